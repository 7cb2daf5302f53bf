"""``custom_generate``: the packed cache for code that imports nothing of ours, from a local folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.models import prompt, tiny_model


FOLDER = Path(__file__).parents[1] / "model_cards" / "entropy-subbyte"
# nothing of ours is imported before the call
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.arange(2, 402)[None] % 126 + 2
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
plain = model.generate(ids, **options)
assert "hf_subbyte_moe" not in sys.modules
exact = model.generate(ids, custom_generate=sys.argv[2], trust_remote_code=True,
                       cache_config={"policy": "uniform:exact", "window": 16}, **options)
assert torch.equal(plain, exact), (plain[0, -4:], exact[0, -4:])
out = model.generate(ids, custom_generate=sys.argv[2], trust_remote_code=True, return_dict_in_generate=True,
                     cache_config={"policy": "uniform:vq2", "window": 16}, **options)
cache = out["cache"] if "cache" in out else out["past_key_values"]
print(type(cache).__name__, cache.kv_config.policy, cache.packed_layers[0].packed_tokens)
"""


def test_generate_from_a_local_folder(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(FOLDER)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["EntropySubbyteCache", "uniform:vq2", "256"]


def test_code_of_others_needs_trust() -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_model().generate(prompt(20), custom_generate=str(FOLDER), trust_remote_code=False)
