"""Measure what each tier of each head's keys and values costs a model's predictions, by its own gradients.

A text is read exactly, and its last tokens are predicted through the cached keys and values. For labels that are drawn
from the model's own predictions, the gradient g of their log-likelihood at a cached key or value gives the Fisher
information E[g g'], and half of e' E[g g'] e is the KL divergence that a small error e causes. So one backward pass
tells the cost of every layer, head and side at once, where replacing them one by one would take a pass for each. The
errors e are those of really quantizing the text in every tier. First the gradients at the keys of half of the texts
give each head's metric; then the other half measures the errors of codes that were chosen under it.

Errors of neighbouring tokens may add up or cancel. Taking tokens as independent is the calmer estimate and taking a
text as a whole the truer one; their mean is used.

Gives up: latent (MLA) caches; second-order effects, such as two heads that stand in for each other.

Source: Fisher information of keys and values, KVQuant (arXiv 2401.18079), CQ (arXiv 2405.03917); sampled labels, not
the text's own, as the curvature of the KL wants it (Kunstner et al., arXiv 1905.12558).
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_subbyte_moe.accounting import tiles_of
from hf_subbyte_moe.codecs import Codec, Table
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from hf_subbyte_moe.codecs.shaping import Shaping, normalized
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.ops import TILE_TOKENS, Order
from hf_subbyte_moe.policy.calibration import Calibration, model_identity
from hf_subbyte_moe.policy.policies import CANDIDATES, KEYS, VALUES
from hf_subbyte_moe.policy.statistics import SideCodec


SCORED_TOKENS = 128
SAMPLES = 4  # of the labels, for each text
LEAST_WINDOWS = 2

States = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values [H, N, D] of the packed region


def calibrate(model: PreTrainedModel, windows: Tensor, seed: int = 0, progress: str | None = None) -> Calibration:
    """Measure a model on texts.

    Args:
        model: a causal language model in evaluation mode; its parameters' ``requires_grad`` is put back.
        windows: ``[n, T]`` tokens of n texts, at least 2; the last 128 of each are predicted.
        seed: draws the labels.
        progress: says what a progress bar shows; None shows none.

    Returns:
        What a sidecar holds.

    Raises:
        ValueError: too few or too short texts, or a model that this cannot measure.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"model type {config.model_type!r} caches latents, which cannot be calibrated")
    plain = KVCacheConfig()
    tiles = tiles_of(windows.shape[1] - SCORED_TOKENS, plain.sinks, plain.window)
    if len(windows) < LEAST_WINDOWS or tiles < 1:
        least = SCORED_TOKENS + TILE_TOKENS + plain.sinks + plain.window
        raise ValueError(f"calibration takes at least {LEAST_WINDOWS} texts of {least} tokens, not {[*windows.shape]}")
    packed = slice(plain.sinks, plain.sinks + TILE_TOKENS * tiles)
    generator = torch.Generator().manual_seed(seed)
    half = len(windows) // 2
    moments: dict[int, Tensor] = {}
    errors: dict[int, Tensor] = {}
    with _frozen(model), tqdm(total=len(windows), desc=progress, unit="text", disable=progress is None) as bar:
        for number, window in enumerate(windows):
            states, gradients = _read_text(model, window.to(model.device), packed, generator)
            if number < half:
                for layer, parts in gradients.items():
                    moment = parts[KEYS].transpose(-1, -2) @ parts[KEYS]  # [S, H, D, D]
                    moments[layer] = moments.get(layer, 0) + moment.sum(0)
            else:
                for layer, pair in states.items():
                    cost = _costs(pair, gradients[layer], moments[layer])
                    errors[layer] = errors.get(layer, 0) + cost / (len(windows) - half)
            bar.update()
    return Calibration(
        model=model_identity(model.config),
        tiers=tuple(codec.name for codec in CANDIDATES),
        errors={layer: cost.cpu().numpy().astype(np.float64) for layer, cost in errors.items()},
        metrics={layer: normalized(moment).cpu() for layer, moment in moments.items()},
        notes={"texts": len(windows), "tokens": windows.shape[1], "samples": SAMPLES, "seed": seed},
    )


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """No gradients for parameters."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _read_text(
    model: PreTrainedModel, window: Tensor, packed: slice, generator: torch.Generator
) -> tuple[States, States]:
    """States of the packed region ``[H, N, D]`` and gradients ``[S, H, N, D]`` there, fp32, of every packed layer."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prompt, rest = window[None, :-SCORED_TOKENS], window[None, -SCORED_TOKENS:]
    few: dict[str, Any] = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    )
    with torch.no_grad():
        model(prompt, **{CACHE_KW: cache}, **few)
    layers: dict[int, Any] = {index: layer for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer}
    leaves = {}
    for index, layer in layers.items():
        layer.keys, layer.values = (part.detach().requires_grad_(True) for part in (layer.keys, layer.values))
        leaves[index] = (layer.keys, layer.values)
    with torch.enable_grad():
        logs = model(rest, **{CACHE_KW: cache}).logits[0].float().log_softmax(-1)
        drawn: list[Sequence[Tensor]] = []
        flat = [leaf for pair in leaves.values() for leaf in pair]
        for sample in range(SAMPLES):
            labels = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator).to(logs.device)
            likelihood = logs.gather(-1, labels).sum()
            drawn.append(torch.autograd.grad(likelihood, flat, retain_graph=sample < SAMPLES - 1))
    states: dict[int, Any] = {}
    gradients: dict[int, Any] = {}
    for place, (index, pair) in enumerate(leaves.items()):
        states[index] = tuple(leaf.detach()[0, :, packed].float() for leaf in pair)
        # a mean over the predictions of a text, and half of it is the divergence
        size = (2 * SCORED_TOKENS * SAMPLES) ** -0.5
        gradients[index] = tuple(
            size * torch.stack([sample[2 * place + side][0, :, packed].float() for sample in drawn])
            for side in (KEYS, VALUES)
        )
    return states, gradients


def _costs(states: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor], moment: Tensor) -> Tensor:
    """``[H, 2, C]`` nats a prediction of each tier."""
    heads = states[KEYS].shape[0]
    costs = torch.empty(heads, 2, len(CANDIDATES), dtype=torch.float32, device=moment.device)
    for side in (KEYS, VALUES):
        codec = _side(states[side], side, moment)
        for number, tier in enumerate(CANDIDATES):
            error = codec.round_trip(states[side], tier) - states[side]
            moved = (gradients[side] * error).sum(-1)  # [S, H, N]
            costs[:, side, number] = 0.5 * (moved.square().sum(-1) + moved.sum(-1).square()).sum(0)
    return costs


def _side(states: Tensor, side: int, moment: Tensor) -> SideCodec:
    dim, device = states.shape[-1], states.device
    rotation = rotation_matrix(dim, device)
    tables = {tier.tier_id: _table(tier, device) for tier in CANDIDATES if tier.table is not Table.NONE}
    mean = shaping = None
    if side == KEYS:
        mean = states.mean(1)
        shaping = Shaping(rotation @ moment @ rotation.t())
    order = Order.KEYS if side == KEYS else Order.VALUES
    return SideCodec(rotation, mean, tables, order, rotation_signs(dim, device), shaping)


def _table(tier: Codec, device: torch.device) -> Tensor:
    return universal_table(tier.format, device)[0, 0].float()
