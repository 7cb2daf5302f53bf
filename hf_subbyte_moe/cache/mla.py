"""Latent attention (DeepSeek V2 and V3) on packed latents.

Transformers caches the latent, from which keys and values of all heads are made by ``kv_b_proj``, and the rotary part
of the key. A module's ``expand_kv`` makes them, of the whole history at each step. Here it is replaced on one model's
modules: what comes from our cache is passed on unexpanded, and the query is multiplied by the projection instead of
every cached token, so one latent head serves all query heads.

    score  = (q_nope Wk) . latent + q_rot . k_rot
    output = (sum_k p_k latent_k) Wv^T

Where ``kv_b_proj`` has no plain weight (it is quantized, adapted or offloaded), history is dequantized and expanded as
before.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

import types
from typing import Any

import torch
from torch import Tensor

from hf_subbyte_moe.cache.handle import LayerView, PackedKV
from hf_subbyte_moe.policy import KEYS, VALUES, plain_weight


class ExpandedView(LayerView):
    """A latent update whose keys and values are only made if somebody else's attention needs them."""

    def __init__(self, view: LayerView, module: Any) -> None:
        super().__init__(view.layer, view.pending)
        self.module = module

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys ``[B, HQ, T, Dk]`` and values ``[B, HQ, T, Dv]`` of all heads, made once."""
        if self._states is None:
            self._states = expand(self.module, *super().states())
        return self._states


def expand(module: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """What the module's own class makes of plain latents."""
    made: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotary)
    return made


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """``[HQ, Dk_nope, r]`` and ``[HQ, Dv, r]``: the projection from latents to keys and to values."""
    weight = module.kv_b_proj.weight
    both = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[-1])
    return both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :]


def has_plain_projection(module: Any, like: Tensor) -> bool:
    """Whether the module's projection can be multiplied into queries."""
    projection = module.kv_b_proj
    return plain_weight(projection, like) is not None and projection.bias is None


def absorb_query(module: Any, query: Tensor) -> Tensor:
    """``[B, HQ, Sq, Dk]`` queries -> ``[B, HQ, Sq, r + rotary]`` queries of latents."""
    nope, rotary = query.split([module.qk_nope_head_dim, query.shape[-1] - module.qk_nope_head_dim], dim=-1)
    return torch.cat([nope @ _weights(module)[0], rotary], dim=-1)


def expand_output(module: Any, output: Tensor) -> Tensor:
    """``[B, HQ, Sq, r]`` weighted latents -> ``[B, HQ, Sq, Dv]``."""
    return output @ _weights(module)[1].transpose(-1, -2).to(output.dtype)


def _expand_kv(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(kv_nope, PackedKV) or not has_plain_projection(module, kv_nope):
        return expand(module, kv_nope, k_rot)
    view = ExpandedView(kv_nope.view_of, module)
    shape = (kv_nope.shape[0], module.num_heads, kv_nope.shape[2])
    return (
        PackedKV(view, KEYS, (*shape, module.qk_head_dim), kv_nope),
        PackedKV(view, VALUES, (*shape, module.v_head_dim), kv_nope),
    )


def pass_latents_on(module: Any) -> None:
    """Let a latent attention module hand our cache's latents to our attention function."""
    module.expand_kv = types.MethodType(_expand_kv, module)


def expand_again(module: Any) -> None:
    """Take :func:`pass_latents_on` back."""
    vars(module).pop("expand_kv", None)
