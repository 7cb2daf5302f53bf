"""A step of Llama's kind of decoders in few launches: norms, rotary, router and experts are one or two kernels each.

It computes what the model's own modules compute, from their weights, in nine launches a layer where they take about
sixty: norm | queries, keys and values | norms of heads, rotary and storing | attention | output projection | residual
and norm | router | experts (2, with the residual). Routers that were steered, experts that are not plain tensors and
other feed-forward layers are called as modules. Attention's projections can be read as int4 copies.

Experts outside the GPU are brought into slots once the router has chosen, and the same two kernels read them there.
The host then has a part in every layer, so such steps cannot be captured.

Gives up: batches of more than 16 rows, which go through the modules; and sums are taken in another order than in the
model's own kernels, so logits differ in their last bits. Forward hooks are honoured where a step without a graph calls
what they are on: the model, its embeddings, routers, placed experts and their blocks, other feed-forward layers.
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
from hf_subbyte_moe.experts import Engine, PlacedExperts, notes_states
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
FUSED_FAMILIES = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe")  # by ``model_type``
_BLOCKS = ("MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
_found: weakref.WeakKeyDictionary[nn.Module, FusedRouter | None] = weakref.WeakKeyDictionary()
_OWN_HOOKS = "transformers.utils.output_capturing"  # which do nothing unless outputs are asked for
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
        index, weights = self._route(states, self.gate)
        return self._compute(states, index, weights, self.experts.gate_up_proj, self.experts.down_proj, stream)

    def _route(self, states: Tensor, call: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
        """``[T, K]`` experts and weights; ``call`` asks the router's module where nothing stands for it."""
        if self.fused is None or has_hooks(self.gate):
            _, weights, index = call(states)
            return index, weights
        routed = router(states, router_matrix(self.gate), self.fused.spec)
        return routed.index, routed.weights

    def _compute(
        self,
        states: Tensor,
        index: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        stream: Tensor,
        slots: Tensor | None = None,
    ) -> Tensor:
        return expert_mlp(
            states,
            index,
            weights,
            gate_up,
            down,
            layout=self.layout,
            activation=self.activation,
            slots=slots,
            residual=stream,
        )


@dataclass(frozen=True)
class _PlacedExperts(_Experts):
    """The same, for experts that an engine brings.

    Attributes:
        block: what holds router and experts.
        norm: whose output it reads: its weights, and what it adds to the mean square.
        engine: brings experts.
        layer: number of the MoE layer.
    """

    block: nn.Module
    norm: tuple[Tensor, float]
    engine: Engine
    layer: int

    def __call__(self, states: Tensor, stream: Tensor) -> Tensor:
        """As for experts that are there; ``stream`` is what the norm has read."""
        if self.engine.states is not None:
            # a block with hooks asks its own router
            self.engine.states.note(self.layer, stream, None if has_hooks(self.block) else self._choice)
        if has_hooks(self.block):
            made: Tensor = self.block(states[:, None])
            return stream + made[:, 0]
        index, weights = self._route(states, self.gate)
        if has_hooks(self.experts):
            made = self.experts(states, index, weights)
            return stream + made
        held, slots = self.engine.bring(self.layer, states, index)
        return self._compute(states, index, weights, held["gate_up_proj"], held["down_proj"], stream, slots)

    def _choice(self, stream: Tensor) -> Tensor:
        """``[T, K]`` experts for what enters the norm, found as in a step; no hook is called."""
        _, states = add_norm(stream, None, *self.norm)
        return self._route(states, self.gate.forward)[0]


@dataclass(frozen=True)
class _Attention:
    """One layer's attention; a module finds its parts slowly, so they are looked up once.

    Attributes:
        module: the layer's own.
        inputs: makes queries, keys and values of states.
        output: projects what was attended to.
        norms: of the heads, or None.
        scaling: of the scores.
    """

    module: Any
    inputs: _Linear
    output: _Linear
    norms: HeadNorms | None
    scaling: float

    def __call__(
        self, steps: CacheSteps, packed: EntropySubbyteLayer, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """``[B, H]``: what attention makes of normalized states."""
        query = rotary(self.inputs(states), *angles, self.norms, steps.place(packed))
        attended = steps.attend(packed, query, self.scaling).to(states.dtype)
        return self.output(attended.reshape(len(states), -1))


class NotNowError(ValueError):
    """A model has no fused step as it is now: it trains, or has hooks that would not be called."""


class FusedStep:
    """The single-token forward of one model."""

    def __init__(self, model: PreTrainedModel, rows: int, copies: PackedProjections | None = None) -> None:
        """Read where its weights are.

        Args:
            model: of one of the families.
            rows: B.
            copies: of attention's projections, to read in their place; None reads the model's own.

        Raises:
            NotNowError: it trains, or has hooks that would not be called; says where.
            ValueError: it is not built as expected, or there are too many rows; says how.
        """
        if rows > MAX_STEP_ROWS:
            raise ValueError(f"kernels take up to {MAX_STEP_ROWS} rows, not {rows}")
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(f"attention is computed by {model.config._attn_implementation!r}")
        if model.training:
            raise NotNowError("the model is in training mode")
        if model.config.model_type not in FUSED_FAMILIES:
            raise ValueError(f"models of type {model.config.model_type!r} have no fused step")
        base: Any = model.base_model
        self._base, self._head = base, _plain_linear(model.get_output_embeddings())
        layers: list[Any] = list(base.layers)
        attention = layers[0].self_attn
        if 2 * base.rotary_emb.inv_freq.numel() != attention.head_dim:
            raise ValueError("not every channel of a head is turned")
        self._is_moe = hasattr(layers[-1].mlp, "gate")
        self._feed_forward = [_feed_forward(layer) for layer in layers]
        self._attention = [_attention(layer.self_attn, copies) for layer in layers]
        parts = ("input_layernorm", "post_attention_layernorm")
        self._norms = [[_norm(getattr(layer, part)) for part in parts] for layer in layers]
        self._last_norm = _norm(base.norm)
        self._refuse_hooks(model)

    def _refuse_hooks(self, model: PreTrainedModel) -> None:
        called = {model, self._base.embed_tokens, self._base.rotary_emb}
        for made in self._feed_forward:
            if isinstance(made, _PlacedExperts):
                called |= {made.block, made.experts, *made.gate.modules()}
            elif not isinstance(made, _Experts):
                called |= {*made.modules()}
        self._watched: list[dict[int, Any]] = []
        for name, module in model.named_modules():
            if module in called:
                continue
            if has_hooks(module):
                raise NotNowError(f"{name or 'the model'} has forward hooks, which fused kernels would not call")
            self._watched += [module._forward_hooks, module._forward_pre_hooks]
        self._hooks = sum(map(len, self._watched))

    @property
    def hooks_changed(self) -> bool:
        """Whether a module that kernels stand for has got or lost a hook since this was made."""
        return sum(map(len, self._watched)) != self._hooks

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
        parts = zip(cache.layers, self._attention, self._norms, self._feed_forward, strict=True)
        for packed, attention, (first, second), feed_forward in parts:
            assert isinstance(packed, EntropySubbyteLayer)
            packed.claim(attention.module)
            stream, states = add_norm(made, residual, *first)
            attended = attention(steps, packed, states, (cos, sin))
            stream, states = add_norm(attended, stream, *second)
            if isinstance(feed_forward, _Experts):
                made, residual = feed_forward(states, stream), None
            else:
                made, residual = feed_forward(states[:, None])[:, 0], stream
        _, states = add_norm(made, residual, *self._last_norm)
        logits = small_linear(states, [self._head])[:, None]
        kind: Any = MoeCausalLMOutputWithPast if self._is_moe else CausalLMOutputWithPast
        output: ModelOutput = kind(logits=logits, **{CACHE_KW: cache})
        return output


def _plain_linear(module: Any) -> Tensor:
    kind: type[Any] = type(module)
    if kind is not nn.Linear or module.bias is not None or "forward" in vars(module):
        raise ValueError(f"a projection is a {kind.__name__}, with a bias or changed")
    weight: Tensor = module.weight
    return weight


def _attention(module: Any, copies: PackedProjections | None) -> _Attention:
    """A layer's attention, with what kernels read of it."""
    if "forward" in vars(module):
        raise ValueError("an attention module was changed")
    *inputs, output = (getattr(module, f"{name}_proj") for name in "qkvo")
    if copies is None:
        plain = [[_plain_linear(part) for part in group] for group in (inputs, [output])]
        first, second = (functools.partial(small_linear, weights=group) for group in plain)
    else:
        packed = [[copies.of(part) for part in group] for group in (inputs, [output])]
        first, second = (functools.partial(packed_linear, matrices=group) for group in packed)
    norms = None
    if hasattr(module, "q_norm"):
        (query, eps), (key, _) = _norm(module.q_norm), _norm(module.k_norm)
        norms = HeadNorms(query, key, eps)
    return _Attention(module, first, second, norms, module.scaling)


def _norm(module: Any) -> tuple[Tensor, float]:
    """A norm's weights, and what it adds to the mean square."""
    if not type(module).__name__.endswith("RMSNorm") or not type(module).__module__.startswith("transformers."):
        raise ValueError(f"a norm is a {type(module).__name__}")
    return module.weight, module.variance_epsilon


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that somebody else has put there."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", "") != _OWN_HOOKS and not notes_states(hook) for hook in hooks)


def _feed_forward(layer: Any) -> Any:
    """Experts for kernels, or the module itself.

    Raises:
        ValueError: an engine brings the experts, and kernels do not read them.
    """
    module = layer.mlp
    placed = any(isinstance(part, PlacedExperts) for part in module.children())
    made = _experts(layer) if type(module).__name__ in _BLOCKS and "forward" not in vars(module) else None
    if made is None and placed:
        raise ValueError(f"kernels do not read the experts of this {type(module).__name__}")
    return module if made is None else made


def _experts(layer: Any) -> _Experts | None:
    """A layer's experts, where kernels can read them."""
    block = layer.mlp
    gate, experts = block.gate, block.experts
    packing: Packing | None = getattr(experts, PACKED, None)
    activation = fused_activation(experts) if packing is None else packing.activation
    plain = packing is not None or (type(experts.gate_up_proj) is nn.Parameter and experts.gate_up_proj.numel() > 0)
    if activation is None or not plain or any("forward" in vars(part) for part in (gate, experts)):
        return None
    fused = None if isinstance(gate, SteeredRouter) else _stand_in(gate)
    read = (gate, fused, experts, None if packing is None else packing.layout, activation)
    if isinstance(experts, PlacedExperts):
        return _PlacedExperts(*read, block, _norm(layer.post_attention_layernorm), *experts._hf_subbyte_moe_experts)
    return _Experts(*read)


def _stand_in(gate: Any) -> FusedRouter | None:
    """What stands for a router, looked up once."""
    if gate not in _found:
        _found[gate] = fused_router(gate, gate.weight.dtype)
    return _found[gate]
