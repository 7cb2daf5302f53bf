"""``python -m hf_subbyte_moe.cli``, and so ``torchrun -m hf_subbyte_moe.cli``."""

from hf_subbyte_moe.cli import main


if __name__ == "__main__":
    main()
