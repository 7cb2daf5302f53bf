"""A step of Llama's kind of decoders in few launches: norms, rotary, router and experts are one or two kernels each.

It computes what the model's own modules compute, from their weights, in nine launches a layer where they take about
sixty: norm | queries, keys and values | norms of heads, rotary and storing | attention | output projection | residual
and norm | router | experts (2, with the residual). Routers that were steered, experts that are not plain tensors and
other feed-forward layers are called as modules.

Gives up: sums are taken in another order than in the model's own kernels, so logits differ in their last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from hf_subbyte_moe.cache import ATTENTION_NAME, CacheSteps, EntropySubbyteCache, EntropySubbyteLayer
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.ops import (
    MAX_EXPERT_TOKENS,
    ExpertCall,
    ExpertFormat,
    ExpertLayout,
    HeadNorms,
    RouterMatrix,
    RouterSpec,
    add_norm,
    expert_mlp,
    rotary,
    router,
    small_linear,
)
from hf_subbyte_moe.routing import SteeredRouter


_FAMILIES = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe")
_ROUTERS = ("MixtralTopKRouter", "Qwen3MoeTopKRouter")
_EXPERTS = ("MixtralExperts", "Qwen3MoeExperts")


@dataclass(frozen=True)
class _Experts:
    """A feed-forward layer of experts, read by kernels.

    Attributes:
        router: the matrix, or the module where that is not all.
        spec: what the router does.
        experts: the module.
        layout: of its weights.
    """

    router: RouterMatrix | nn.Module
    spec: RouterSpec
    experts: Any
    layout: ExpertLayout

    def __call__(self, states: Tensor, stream: Tensor) -> Tensor:
        """What experts make of normalized states ``[T, H]``, added to the residual stream."""
        if isinstance(self.router, RouterMatrix):
            routed = router(states, self.router, self.spec)
            weights, index = routed.weights, routed.index
        else:
            _, weights, index = self.router(states)
        weight = self.experts
        return expert_mlp(
            ExpertCall(states, index, weights, weight.gate_up_proj, weight.down_proj, self.layout, residual=stream)
        )


class FusedStep:
    """The single-token forward of one model."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        """Read where its weights are.

        Args:
            model: of one of the families.
            rows: B.

        Raises:
            ValueError: it is not built as expected, or there are too many rows; says how.
        """
        if rows > MAX_EXPERT_TOKENS:
            raise ValueError(f"kernels take up to {MAX_EXPERT_TOKENS} rows")
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
        self._projections = [_projections(layer.self_attn) for layer in self._layers]
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
        projections: Sequence[Tensor],
        steps: CacheSteps,
        packed: EntropySubbyteLayer,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """``[B, H]``: what attention makes of normalized states."""
        *inputs, output = projections
        norms = None
        if hasattr(module, "q_norm"):
            norms = HeadNorms(module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon)
        query = rotary(small_linear(states, inputs), *angles, norms, steps.place(packed))
        attended = steps.attend(packed, query, module.scaling).to(states.dtype)
        return small_linear(attended.reshape(len(states), -1), [output])


def _plain_linear(module: Any) -> Tensor:
    kind: type[Any] = type(module)
    if kind is not nn.Linear or module.bias is not None or "forward" in vars(module):
        raise ValueError(f"a projection is a {kind.__name__}, with a bias or changed")
    weight: Tensor = module.weight
    return weight


def _projections(attention: Any) -> list[Tensor]:
    """Weights of queries, keys, values and output."""
    if "forward" in vars(attention):
        raise ValueError("an attention module was changed")
    return [_plain_linear(getattr(attention, f"{name}_proj")) for name in "qkvo"]


def _norms(layer: Any) -> list[nn.Module]:
    attention = layer.self_attn
    heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *heads]


def _feed_forward(module: Any) -> Any:
    """Experts for kernels, or the module itself."""
    gate: Any = getattr(module, "gate", None)
    experts: Any = getattr(module, "experts", None)
    changed = any("forward" in vars(part) for part in (module, gate, experts) if part is not None)
    if type(experts).__name__ not in _EXPERTS or changed:
        return module
    weight = experts.gate_up_proj
    plain = type(weight) is nn.Parameter and weight.is_floating_point() and weight.dim() == 3 and weight.numel() > 0
    if not plain or not isinstance(experts.act_fn, nn.SiLU):
        return module
    native = type(gate).__name__ in _ROUTERS and not isinstance(gate, SteeredRouter)
    mixtral = type(gate).__name__ == "MixtralTopKRouter"
    norm = "sum" if mixtral or getattr(gate, "norm_topk_prob", True) else "none"
    spec = RouterSpec(top_k=getattr(gate, "top_k", 1), norm=norm, float_weights=mixtral)
    layout = ExpertLayout(ExpertFormat.MODEL, weight.shape[2], weight.shape[1] // 2, weight.dtype)
    return _Experts(RouterMatrix(gate.weight) if native else gate, spec, experts, layout)
