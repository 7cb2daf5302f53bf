"""What ``update()`` returns: tensors that know their layer.

Models pass the keys and values that a cache returns straight to the attention function. Ours recognises a
:class:`PackedKV` and works on the layer's packed tiles; every other operation gets the dequantized states, so a model
that does not use our attention function still computes something right, slowly and without statistics.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


if TYPE_CHECKING:
    from hf_subbyte_moe.cache.layer import EntropySubbyteLayer


class FixedAddressError(ValueError):
    """A step at fixed addresses needs something that changes its address."""


class ModuleReference:
    """A module that is not kept alive. Copies refer to it too; pickles, which other processes read, to none."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    @property
    def module(self) -> torch.nn.Module | None:
        """The module, while it lives."""
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleReference":
        """Itself: it never changes."""
        return self

    def __reduce__(self) -> tuple[type["ModuleReference"], tuple[()]]:
        """Pickled without the module."""
        return ModuleReference, ()


class LayerView:
    """One update as an attention call sees it.

    Attributes:
        layer: the layer.
        pending: whether the update's tokens still wait for their attention call before they are packed.
    """

    def __init__(self, layer: "EntropySubbyteLayer", pending: bool) -> None:
        self.layer = layer
        self.pending = pending
        self._states: tuple[Tensor, Tensor] | None = None

    def states(self) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values ``[B, H, T, D]``, made once."""
        if self._states is None:
            self._states = self.layer.dequantize()
            if self.pending:
                self.layer.settle_without_statistics()
        return self._states


class PackedKV(torch.Tensor):
    """Keys or values ``[B, H, T, D]`` of a layer; dequantizes itself when anything but our attention touches it."""

    view_of: LayerView
    side: int

    @staticmethod
    def __new__(cls, view: LayerView, side: int, shape: tuple[int, ...], like: Tensor) -> "PackedKV":
        made: PackedKV = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        return made

    def __init__(self, view: LayerView, side: int, shape: tuple[int, ...], like: Tensor) -> None:
        self.view_of = view
        self.side = side

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value.view_of.states()[value.side] if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedKV({('keys', 'values')[self.side]}, shape={tuple(self.shape)}, dtype={self.dtype})"
