"""A step of Llama's kind of decoders in few launches: norms, rotary, router and experts are one or two kernels each.

It computes what the model's own modules compute, from their weights, in nine launches a layer where they take about
sixty: norm | queries, keys and values | norms of heads, rotary and storing | attention | output projection | residual
and norm | router | experts (2, with the residual). Routers that were steered, experts that are not plain tensors and
other feed-forward layers are called as modules. Attention's projections can be read as int4 copies.

Gives up: batches of more than 16 rows, which go through the modules; and sums are taken in another order than in the
model's own kernels, so logits differ in their last bits.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from hf_subbyte_moe.cache import ATTENTION_NAME, CacheSteps, EntropySubbyteCache, EntropySubbyteLayer
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.experts.fused import fused_activation
from hf_subbyte_moe.experts.quantized import PACKED, Packing
from hf_subbyte_moe.ops import (
    MAX_LINEAR_TOKENS,
    HeadNorms,
    PackedMatrix,
    add_norm,
    packed_linear,
    packed_obstacle,
    rotary,
    small_linear,
)
from hf_subbyte_moe.ops_moe import MAX_EXPERT_TOKENS, MAX_ROUTER_TOKENS, ExpertLayout, expert_mlp, router
from hf_subbyte_moe.routing import SteeredRouter
from hf_subbyte_moe.routing.fused import FusedRouter, fused_router, router_matrix


MAX_STEP_ROWS = min(MAX_LINEAR_TOKENS, MAX_EXPERT_TOKENS, MAX_ROUTER_TOKENS)
_FAMILIES = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe")
_BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
_found: weakref.WeakKeyDictionary[nn.Module, FusedRouter | None] = weakref.WeakKeyDictionary()
_Linear = Callable[[Tensor], Tensor]


class PackedProjections:
    """int4 copies of the projections of one model, each made once for as long as its weights stay what they are."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, PackedMatrix]] = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module) -> PackedMatrix:
        """The copy of a projection's weights.

        Raises:
            ValueError: it cannot be packed, or no kernel would read it; says why.
        """
        weight = _plain_linear(module)
        state = (weight.data_ptr(), None if weight.is_inference() else weight._version)
        known = self._made.get(module)
        if known is None or known[0]() is not weight or known[1] != state:
            known = self._made[module] = weakref.ref(weight), state, PackedMatrix.of(weight)
        packed = known[2]
        obstacle = packed_obstacle(weight[:1], [packed]) if weight.is_cuda else None
        if obstacle is not None:  # the reference would unpack whole matrices in every step
            raise ValueError(f"its projections cannot be read as int4: {obstacle}")
        return packed


@dataclass(frozen=True)
class _Experts:
    """A feed-forward layer of experts, read by kernels.

    Attributes:
        gate: the router.
        fused: what stands for it; None where it was steered or is not known.
        experts: the module.
        layout: of its weights, where they are packed.
        activation: of its hidden units.
    """

    gate: nn.Module
    fused: FusedRouter | None
    experts: Any
    layout: ExpertLayout | None
    activation: str

    def __call__(self, states: Tensor, stream: Tensor) -> Tensor:
        """What experts make of normalized states ``[T, H]``, added to the residual stream."""
        if self.fused is None:
            _, weights, index = self.gate(states)
        else:
            routed = router(states, router_matrix(self.gate), self.fused.spec)
            weights, index = routed.weights, routed.index
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        return expert_mlp(
            states, index, weights, gate_up, down, layout=self.layout, activation=self.activation, residual=stream
        )


class FusedStep:
    """The single-token forward of one model."""

    def __init__(self, model: PreTrainedModel, rows: int, copies: PackedProjections | None = None) -> None:
        """Read where its weights are.

        Args:
            model: of one of the families.
            rows: B.
            copies: of attention's projections, to read in their place; None reads the model's own.

        Raises:
            ValueError: it is not built as expected, or there are too many rows; says how.
        """
        if rows > MAX_STEP_ROWS:
            raise ValueError(f"kernels take up to {MAX_STEP_ROWS} rows, not {rows}")
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(f"attention is computed by {model.config._attn_implementation!r}")
        if model.training:
            raise ValueError("the model is in training mode")
        if model.config.model_type not in _FAMILIES:
            raise ValueError(f"models of type {model.config.model_type!r} have no fused step")
        base: Any = model.base_model
        self._base, self._head = base, _plain_linear(model.get_output_embeddings())
        self._layers: list[Any] = list(base.layers)
        attention = self._layers[0].self_attn
        if 2 * base.rotary_emb.inv_freq.numel() != attention.head_dim:
            raise ValueError("not every channel of a head is turned")
        self._is_moe = hasattr(self._layers[-1].mlp, "gate")
        self._feed_forward = [_feed_forward(layer.mlp) for layer in self._layers]
        self._projections = [_projections(layer.self_attn, copies) for layer in self._layers]
        for norm in [base.norm, *(part for layer in self._layers for part in _norms(layer))]:
            if not type(norm).__name__.endswith("RMSNorm") or not type(norm).__module__.startswith("transformers."):
                raise ValueError(f"a norm is a {type(norm).__name__}")

    def __call__(
        self, steps: CacheSteps, cache: EntropySubbyteCache, input_ids: Tensor, position_ids: Tensor
    ) -> ModelOutput:
        """One token a row.

        Args:
            steps: of the cache, during a step.
            cache: ours.
            input_ids: ``[B, 1]``.
            position_ids: ``[B, 1]`` or ``[1, 1]``.

        Returns:
            What the model's own forward returns.
        """
        stream = self._base.embed_tokens(input_ids[:, 0])  # [B, H]
        angles = self._base.rotary_emb(stream[:, None], position_ids=position_ids)
        cos, sin = (angle[:, 0] for angle in angles)
        made, residual = stream, None
        for index, layer in enumerate(self._layers):
            packed = cache.layers[index]
            assert isinstance(packed, EntropySubbyteLayer)
            packed.claim(layer.self_attn)
            norm = layer.input_layernorm
            stream, states = add_norm(made, residual, norm.weight, norm.variance_epsilon)
            attended = self._attend(layer.self_attn, self._projections[index], steps, packed, states, (cos, sin))
            norm = layer.post_attention_layernorm
            stream, states = add_norm(attended, stream, norm.weight, norm.variance_epsilon)
            feed_forward = self._feed_forward[index]
            if isinstance(feed_forward, _Experts):
                made, residual = feed_forward(states, stream), None
            else:
                made, residual = feed_forward(states[:, None])[:, 0], stream
        norm = self._base.norm
        _, states = add_norm(made, residual, norm.weight, norm.variance_epsilon)
        logits = small_linear(states, [self._head])[:, None]
        kind: Any = MoeCausalLMOutputWithPast if self._is_moe else CausalLMOutputWithPast
        output: ModelOutput = kind(logits=logits, **{CACHE_KW: cache})
        return output

    @staticmethod
    def _attend(
        module: Any,
        projections: tuple[_Linear, _Linear],
        steps: CacheSteps,
        packed: EntropySubbyteLayer,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """``[B, H]``: what attention makes of normalized states."""
        inputs, output = projections
        norms = None
        if hasattr(module, "q_norm"):
            norms = HeadNorms(module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon)
        query = rotary(inputs(states), *angles, norms, steps.place(packed))
        attended = steps.attend(packed, query, module.scaling).to(states.dtype)
        return output(attended.reshape(len(states), -1))


def _plain_linear(module: Any) -> Tensor:
    kind: type[Any] = type(module)
    if kind is not nn.Linear or module.bias is not None or "forward" in vars(module):
        raise ValueError(f"a projection is a {kind.__name__}, with a bias or changed")
    weight: Tensor = module.weight
    return weight


def _projections(attention: Any, copies: PackedProjections | None) -> tuple[_Linear, _Linear]:
    """What makes queries, keys and values of states, and the output."""
    if "forward" in vars(attention):
        raise ValueError("an attention module was changed")
    *inputs, output = (getattr(attention, f"{name}_proj") for name in "qkvo")
    if copies is None:
        plain = [[_plain_linear(module) for module in group] for group in (inputs, [output])]
        first, second = (functools.partial(small_linear, weights=group) for group in plain)
    else:
        packed = [[copies.of(module) for module in group] for group in (inputs, [output])]
        first, second = (functools.partial(packed_linear, matrices=group) for group in packed)
    return first, second


def _norms(layer: Any) -> list[nn.Module]:
    attention = layer.self_attn
    heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *heads]


def _feed_forward(module: Any) -> Any:
    """Experts for kernels, or the module itself."""
    if type(module).__name__ not in _BLOCKS or "forward" in vars(module):
        return module
    gate, experts = module.gate, module.experts
    packing: Packing | None = getattr(experts, PACKED, None)
    activation = fused_activation(experts) if packing is None else packing.activation
    plain = packing is not None or (type(experts.gate_up_proj) is nn.Parameter and experts.gate_up_proj.numel() > 0)
    if activation is None or not plain or any("forward" in vars(part) for part in (gate, experts)):
        return module
    fused = None if isinstance(gate, SteeredRouter) else _stand_in(gate)
    return _Experts(gate, fused, experts, None if packing is None else packing.layout, activation)


def _stand_in(gate: Any) -> FusedRouter | None:
    """What stands for a router, looked up once."""
    if gate not in _found:
        _found[gate] = fused_router(gate, gate.weight.dtype)
    return _found[gate]
