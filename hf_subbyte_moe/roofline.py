"""What one decode step must cost, from a model's config alone: bytes, operations, milliseconds.

The model is built without weights (on the meta device), so that every parameter is counted as Transformers makes it.
A step reads every weight but the input embeddings and the experts that nobody chose, and the whole cache; what takes
longer, reading or computing, is the time of a GPU, and what GPUs send each other is added. Cache bytes come from
:mod:`hf_subbyte_moe.accounting`.

Gives up: launches, latencies and imbalance. It is a floor that nothing can pass, not a forecast. Weights are split
evenly; a cache is split by rows and KV heads as far as there are some, although latents lie on every GPU in
Transformers' own plans.

Source: the roofline model, Williams et al. 2009; ring all-reduce, Patarasu and Yuan 2009.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_subbyte_moe.accounting import PAGE_BYTES, TILE_TOKENS, tiles_of
from hf_subbyte_moe.config import DEFAULT_BITS, KVCacheConfig


_BF16_BYTES = 2
_FP8_BLOCK = 128 * 128  # weights that share an fp32 scale
_MXFP4_BITS = 4 + 8 / 32  # a scale of a byte for 32 weights
_SCALE_BITS = 16  # of a group in GPTQ and AWQ files; their zero points are in the codes' width
_EXPERTS = ".experts."
_NAMED_BITS = ("bits", "w_bit", "weight_bits", "nbits")


@dataclass(frozen=True)
class Machine:
    """One GPU and its links.

    Attributes:
        name: what tables call it.
        memory_bytes: of one GPU.
        memory_rate: bytes/s that a GPU reads.
        operations: bf16 operations/s.
        link_rate: bytes/s that a GPU sends to others of its node.
        gpus_a_node: GPUs of one node.
        node_rate: bytes/s that a GPU sends to other nodes.
    """

    name: str
    memory_bytes: float
    memory_rate: float
    operations: float
    link_rate: float
    gpus_a_node: int
    node_rate: float


# memory rate: a device copy, reads and writes counted, in kernels/benchmarks/results; the rest: NVIDIA's data sheet
H200 = Machine("H200", 141e9, 4.285e12, 989e12, 450e9, 8, 50e9)


@dataclass(frozen=True)
class LayerCache:
    """What a layer keeps of a token.

    Attributes:
        heads: KV heads; 1 for latents.
        widths: values of a head's key and value.
        query_heads: of its attention.
        window: tokens that it sees; None means all.
    """

    heads: int
    widths: tuple[int, int]
    query_heads: int
    window: int | None = None

    @property
    def values(self) -> int:
        """Values of a token, both sides and all heads."""
        return self.heads * sum(self.widths)

    def plain_bytes(self, tokens: int) -> int:
        """A row of ``tokens`` in bf16."""
        return min(tokens, self.window or tokens) * self.values * _BF16_BYTES

    def packed_bytes(self, tokens: int, bits: tuple[float, float], options: KVCacheConfig) -> float:
        """A row of ``tokens`` with so many bits a packed key and value; layers with a window do not pack."""
        if self.window is not None:
            return self.plain_bytes(tokens)
        tiles = tiles_of(tokens, options.sinks, options.window)
        exact = (tokens - tiles * TILE_TOKENS) * self.values * _BF16_BYTES
        record = TILE_TOKENS * sum(width * side for width, side in zip(self.widths, bits, strict=True)) / 8
        return exact + self.heads * tiles * (record + 2 * PAGE_BYTES)


@dataclass(frozen=True)
class Shape:
    """A model, counted.

    Attributes:
        name: for people.
        hidden_size: of a token's state.
        experts: routed experts of a layer; 0 in a dense model.
        top_k: experts that a token takes.
        moe_layers: layers with routed experts.
        parameters: all of them.
        expert_parameters: of one routed expert.
        dense_parameters: that every token meets: without routed experts and input embeddings.
        total_bytes: of all weights.
        expert_bytes: of one routed expert.
        dense_bytes: as ``dense_parameters``.
        layers: of the cache.
    """

    name: str
    hidden_size: int
    experts: int
    top_k: int
    moe_layers: int
    parameters: int
    expert_parameters: float
    dense_parameters: int
    total_bytes: float
    expert_bytes: float
    dense_bytes: float
    layers: Sequence[LayerCache]

    @property
    def active_parameters(self) -> float:
        """That one token is multiplied with."""
        return self.dense_parameters + self.moe_layers * self.top_k * self.expert_parameters

    def distinct_experts(self, batch: int) -> float:
        """Experts of a layer that a step of ``batch`` tokens reads, if every expert is as likely."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch) if self.experts else 0.0


@dataclass(frozen=True)
class Step:
    """One decode step of ``batch`` rows that hold ``context`` tokens each, on ``gpus`` GPUs.

    Attributes:
        context: tokens of a row.
        batch: rows.
        gpus: GPUs.
        bits: of a packed value; None for a plain bf16 cache.
        weights_a_gpu: bytes held.
        cache_a_gpu: bytes held; of the GPU that holds most.
        fits: whether weights and cache fit.
        weights_read: bytes that all GPUs read together.
        cache_read: likewise.
        sent_a_gpu: bytes that a GPU sends to others.
        memory_ms: reading, of the GPU that reads most.
        compute_ms: computing.
        link_ms: sending.
    """

    context: int
    batch: int
    gpus: int
    bits: float | None
    weights_a_gpu: float
    cache_a_gpu: float
    fits: bool
    weights_read: float
    cache_read: float
    sent_a_gpu: float
    memory_ms: float
    compute_ms: float
    link_ms: float

    @property
    def ms(self) -> float:
        """Of the step."""
        return max(self.memory_ms, self.compute_ms) + self.link_ms


def why_not(name: str, error: Exception) -> str:
    """Why there is no model of a name, in a line; Transformers takes a paragraph, and a wrong path for an id."""
    like_a_path = name.startswith((".", "~")) or name.count("/") != 1 or Path(name).is_absolute()
    if like_a_path and "/" in name and not Path(name).exists():
        return "there is no such file or folder"
    return str(error).strip().splitlines()[0]


def read_config(name: str) -> PreTrainedConfig:
    """The config of a Hub repository, a folder, or a JSON file.

    Raises:
        ValueError: no such config, or not of a model that Transformers knows.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"{name!r} is no Hub repository, folder or JSON file with a model's config: {why_not(name, error)}"
        ) from None
    return config


def shape_of(config: PreTrainedConfig, name: str | None = None) -> Shape:
    """Count a model.

    Args:
        config: of a causal language model.
        name: for people; the config's own where it is None.

    Raises:
        ValueError: quantized weights of a kind whose bytes are not known, or a layer that keeps something else than
            keys and values.
    """
    quantization = _quantization(config)
    plain = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(plain)
    text = config.get_text_config(decoder=True)
    itemsize = text.dtype.itemsize if isinstance(text.dtype, torch.dtype) else _BF16_BYTES
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding
    counts = {"dense": [0, 0.0], "expert": [0, 0.0], "looked up": [0, 0.0]}
    experts, owners = 0, set()
    for parameter_name, parameter in model.named_parameters():
        kind = "looked up" if parameter is embedding and not tied else "dense"
        if _EXPERTS in parameter_name:
            kind, experts = "expert", parameter.shape[0]
            owners.add(parameter_name.rpartition(_EXPERTS)[0])
        head = parameter is embedding or parameter_name.startswith("lm_head")
        bits = _parameter_bits(parameter_name, parameter, head, quantization, 8 * itemsize)
        counts[kind][0] += parameter.numel()
        counts[kind][1] += parameter.numel() * bits / 8
    slots = max(1, experts * len(owners))
    return Shape(
        name=name or config.name_or_path or config.model_type,
        hidden_size=text.hidden_size,
        experts=experts,
        top_k=int(getattr(text, "num_experts_per_tok", 0) or 0) if experts else 0,
        moe_layers=len(owners),
        parameters=int(sum(count for count, _ in counts.values())),
        expert_parameters=counts["expert"][0] / slots,
        dense_parameters=int(counts["dense"][0]),
        total_bytes=sum(size for _, size in counts.values()),
        expert_bytes=counts["expert"][1] / slots,
        dense_bytes=counts["dense"][1],
        layers=_cached_layers(text),
    )


def _quantization(config: PreTrainedConfig) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None) or {}
    return found if isinstance(found, dict) else dict(found.to_dict())


def _parameter_bits(name: str, parameter: torch.Tensor, head: bool, quantization: dict[str, Any], plain: int) -> float:
    """Bits of one weight in the published files. Vectors, embeddings and routers are never quantized."""
    if not quantization or parameter.ndim < 2 or head or name.endswith((".gate.weight", ".router.weight")):
        return plain
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        return 8 + 32 / _FP8_BLOCK
    if method == "mxfp4":
        return _MXFP4_BITS if _EXPERTS in name else plain
    bits = next((quantization[key] for key in _NAMED_BITS if isinstance(quantization.get(key), int)), None)
    if bits is None:
        raise ValueError(
            f"weights quantized by {method!r} have bytes that are not known; fp8, mxfp4, gptq and awq are"
        )
    group = quantization.get("group_size") or quantization.get("q_group_size") or 0
    return float(bits + ((_SCALE_BITS + bits) / group if group > 0 else 0))


def _cached_layers(text: PreTrainedConfig) -> list[LayerCache]:
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        kept = (1, (text.kv_lora_rank, text.qk_rope_head_dim))
    else:
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        kept = (getattr(text, "num_key_value_heads", None) or heads, (width, width))
    layers = []
    for layer in DynamicCache(config=text).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layers.append(LayerCache(*kept, heads, int(text.sliding_window)))
        elif type(layer) is DynamicLayer:
            layers.append(LayerCache(*kept, heads))
        else:
            raise ValueError(f"model type {text.model_type!r} has a layer whose cache is a {type(layer).__name__}")
    return layers


def step(
    shape: Shape, context: int, batch: int, gpus: int, bits: float | None = None, machine: Machine = H200
) -> Step:
    """What a decode step costs at least.

    Args:
        shape: of the model.
        context: tokens that every row holds.
        batch: rows.
        gpus: GPUs; full nodes from one node on.
        bits: bits a packed value, scales included; None for a plain bf16 cache.
        machine: what it runs on.

    Raises:
        ValueError: a number below 1, or GPUs that do not fill their nodes.
    """
    for name, value in (("context", context), ("batch", batch), ("gpus", gpus)):
        if value < 1:
            raise ValueError(f"{name}={value} is not possible: at least 1")
    if gpus > machine.gpus_a_node and gpus % machine.gpus_a_node:
        raise ValueError(f"gpus={gpus} is not possible: more than {machine.gpus_a_node} come in full nodes")
    options = KVCacheConfig()
    cache = 0.0
    cache_a_gpu = 0.0
    for layer in shape.layers:
        row = layer.plain_bytes(context) if bits is None else layer.packed_bytes(context, (bits, bits), options)
        units = batch * layer.heads
        cache += batch * row
        cache_a_gpu += -(-units // gpus) * row / layer.heads
    weights = shape.dense_bytes + shape.moe_layers * shape.distinct_experts(batch) * shape.expert_bytes
    attention = sum(
        2 * layer.query_heads * _products(layer) * min(context, layer.window or context) for layer in shape.layers
    )
    operations = batch * (2 * shape.active_parameters + attention)
    sent, seconds = _all_reduce(batch * shape.hidden_size * _BF16_BYTES, gpus, machine)
    collectives = 2 * len(shape.layers)  # behind attention and behind the experts of a layer
    return Step(
        context=context,
        batch=batch,
        gpus=gpus,
        bits=bits,
        weights_a_gpu=shape.total_bytes / gpus,
        cache_a_gpu=cache_a_gpu,
        fits=shape.total_bytes / gpus + cache_a_gpu <= machine.memory_bytes,
        weights_read=weights,
        cache_read=cache,
        sent_a_gpu=collectives * sent,
        memory_ms=1e3 * (weights / gpus + cache_a_gpu) / machine.memory_rate,
        compute_ms=1e3 * operations / gpus / machine.operations,
        link_ms=1e3 * collectives * seconds,
    )


def _products(layer: LayerCache) -> int:
    """Products that a query head makes with one token: latents are key and value at once."""
    first, second = layer.widths
    return first + second + (first if first != second else 0)


def _all_reduce(size: float, gpus: int, machine: Machine) -> tuple[float, float]:
    """Bytes that a GPU sends to sum ``size`` bytes over all, and seconds; over nodes, each GPU sums its part."""
    inside = min(gpus, machine.gpus_a_node)
    nodes = gpus // inside
    near = 2 * (inside - 1) / inside * size
    far = 2 * (nodes - 1) / nodes * size / inside
    return near + far, near / machine.link_rate + far / machine.node_rate


def steps(
    shape: Shape, context: int, batch: int, gpus: int, bits: float = DEFAULT_BITS, machine: Machine = H200
) -> tuple[Step, Step]:
    """With a plain cache, and with a packed one."""
    return (
        step(shape, context, batch, gpus, None, machine),
        step(shape, context, batch, gpus, bits, machine),
    )
