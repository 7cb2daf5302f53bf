"""Other caches for the quality harness: peers as others build them, and our own codes with parts taken away.

Most of them quantize and dequantize what leaves their exact window and keep the result in the model's dtype, so a run
shows what their codes cost and nothing of their speed; their bits are formulas (``simulated.py``). Entries of a config
name them: ``{"cache": "kivi", "nbits": 2}``.
"""

from baselines.ours import Simulated
from baselines.peers import Fp8, Kivi, Literal, LloydMax, MinMax
from baselines.simulated import Baseline, Bits, MissingPackageError
from baselines.stock import Hqq, Quanto


__all__ = ["BASELINES", "Baseline", "Bits", "MissingPackageError"]

BASELINES: dict[str, type[Baseline]] = {
    "hqq": Hqq,
    "quanto": Quanto,
    "min-max": MinMax,
    "kivi": Kivi,
    "lloyd-max": LloydMax,
    "fp8": Fp8,
    "literal": Literal,
    "simulated": Simulated,
}
