"""Transformers' own ``QuantizedCache`` with its ``hqq`` and ``quanto`` backends.

Their code runs as it is, defaults included, except for four things: each row of a batch is quantized on its own
(stock groups can run across rows, and a row's result would depend on its neighbours); what it gives back is kept until
the next flush instead of being computed at every step; where groups must divide the tokens, which stock refuses, the
last token is repeated; and quanto unpacks in plain PyTorch, or it would first compile an extension. The whole prompt
is quantized at once, without a window; 128 tokens later everything is quantized again.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import QuantizedCache

from baselines.peers import SCALE_BITS
from baselines.simulated import Baseline, Bits, MissingPackageError, count_bits, full_attention_layers


class StockCache(QuantizedCache):
    """A quantized cache whose rows do not see each other."""

    def __init__(self, backend: str, config: PreTrainedConfig, nbits: int, group_size: int, axis: int) -> None:
        super().__init__(backend, config, nbits=nbits, q_group_size=group_size, axis_key=axis, axis_value=axis)
        self._nbits, self._group = nbits, group_size
        for layer in self.layers:
            _row_by_row(layer, 1 if axis == 0 else group_size)

    def size(self) -> Bits:
        """What it would hold now; scale and zero point at 16 bits."""
        code = record = 0.0
        packed = values = itemsize = 0
        for layer in self.layers:
            for held, exact in ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values)):
                packed += held.numel()
                values += held.numel() + exact.numel()
                itemsize = held.dtype.itemsize
                code += self._nbits * held.numel()
                record += (self._nbits + 2 * SCALE_BITS / self._group) * held.numel()
        return count_bits(code, record, packed, values, 0.0, itemsize)


def _row_by_row(layer: Any, multiple: int) -> None:
    """Let a stock layer keep what its code gives back, computed for each row alone."""
    quantize, dequantize = layer._quantize, layer._dequantize

    def held(states: Tensor, axis: int) -> Tensor:
        missing = -states.shape[2] % multiple
        filled = torch.cat([states, states[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
        rows = [dequantize(quantize(row.contiguous(), axis)) for row in filled.split(1)]
        return torch.cat(rows)[:, :, : states.shape[2]].to(states.dtype)

    layer._quantize, layer._dequantize = held, lambda states: states


def _needs(module: str, package: str) -> None:
    """Raise a MissingPackageError that says what to install."""
    parents = module.split(".")
    for depth in range(1, len(parents) + 1):
        if importlib.util.find_spec(".".join(parents[:depth])) is None:
            raise MissingPackageError(f"it needs a package that is not installed: pip install {package}")


def _unpack_plainly() -> None:
    """Let quanto unpack codes as the reference of its operator does, without the extension."""

    def unpack(packed: Any) -> Tensor:
        codes = [packed._data >> shift & (1 << packed._bits) - 1 for shift in range(0, 8, packed._bits)]
        return torch.cat(codes)[: packed.shape[0]]

    importlib.import_module("optimum.quanto.tensor.packed").PackedTensor.unpack = unpack


@dataclass(frozen=True)
class Hqq(Baseline):
    """The ``hqq`` backend; ``axis`` 0 is Transformers' default, 1 puts 64 channels of one token in a group."""

    nbits: int
    group_size: int = 64
    axis: int = 0

    def __post_init__(self) -> None:
        self.check("nbits", "one of [1, 2, 3, 4, 8]", self.nbits in (1, 2, 3, 4, 8))
        self.whole("group_size", 1)
        self.check("axis", "0 or 1", self.axis in (0, 1))

    def cache(self, config: PreTrainedConfig) -> StockCache:
        """See the module's text."""
        full_attention_layers(config)
        _needs("hqq", "hqq")
        return StockCache("hqq", config, self.nbits, self.group_size, self.axis)


@dataclass(frozen=True)
class Quanto(Baseline):
    """The ``quanto`` backend; ``axis`` 0 is Transformers' default, -1 puts 64 tokens of one channel in a group."""

    nbits: int
    group_size: int = 64
    axis: int = 0

    def __post_init__(self) -> None:
        self.check("nbits", "2 or 4", self.nbits in (2, 4))
        self.whole("group_size", 1)
        self.check("axis", "0 or -1", self.axis in (0, -1))

    def cache(self, config: PreTrainedConfig) -> StockCache:
        """See the module's text."""
        full_attention_layers(config)
        _needs("optimum.quanto", "optimum-quanto")
        _unpack_plainly()
        return StockCache("quanto", config, self.nbits, self.group_size, self.axis)
