"""Where routers sit, and which models have one that can be steered.

A router is a module of its own that returns ``(router_logits, top_k_weights, top_k_index)``, as nearly every family of
Transformers has it. The list of families names those that the conformance test covers; another model is accepted if
its routers look alike, and refused by name if they do not.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "glm4_moe",
    "phimoe",
    "ernie4_5_moe",
    "minimax",
)
# their routers return something else, or their blocks do not use what the router returns
_OTHER_FORMS = ("llama4", "jetmoe", "switch_transformers", "nllb_moe", "dbrx", "zaya", "deimv2", "granite_docling")
_ROUTER_NAME = re.compile(r"(Router|Gate|Gating)$")
_PROBE_TOKENS = 2


@dataclass(frozen=True)
class RouterPlace:
    """One router of a model.

    Attributes:
        name: its name in the model.
        module: the router.
        experts: how many it chooses from.
        top_k: how many it chooses.
    """

    name: str
    module: nn.Module
    experts: int
    top_k: int


def find_routers(model: PreTrainedModel) -> list[RouterPlace]:
    """A model's routers, in the order of its layers.

    Raises:
        ValueError: it has none, or they are of a form that cannot be steered; names the model and what is supported.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    places = [
        place for name, module in model.named_modules() if (place := _as_router(name, module, model)) is not None
    ]
    if kind in _OTHER_FORMS:
        raise _refuse(model, kind, "its router does not return (logits, weights, indices)")
    if not places:
        raise _refuse(model, kind, "it has no router that returns (logits, weights, indices)")
    if not _returns_triple(places[0], model):
        raise _refuse(model, kind, f"its router {places[0].name} does not return (logits, weights, indices)")
    if len({(place.experts, place.top_k) for place in places}) != 1:
        raise _refuse(model, kind, "its layers differ in their experts")
    return places


def experts_of_router(model: PreTrainedModel, place: RouterPlace) -> nn.Module:
    """The module that holds the experts a router chooses from.

    Raises:
        ValueError: there is none beside it that takes (hidden states, indices, weights).
    """
    block: Any = model.get_submodule(place.name.rpartition(".")[0])
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module) or isinstance(experts, nn.ModuleList):
        raise ValueError(f"the experts of {place.name} are not beside it in one module, as one would need it")
    return experts


def native_groups(router: nn.Module) -> int:
    """How many groups the router itself restricts tokens to some of; 1 where it does not."""
    groups, kept = getattr(router, "num_group", None), getattr(router, "topk_group", None)
    if not isinstance(groups, int) or not isinstance(kept, int) or kept >= groups:
        return 1
    if getattr(router, "topk_method", "group_limited_greedy") != "group_limited_greedy":
        return 1
    return groups


def native_groups_kept(router: nn.Module) -> int:
    """How many of its own groups the router keeps a token in; 1 where it has none."""
    return int(router.topk_group) if native_groups(router) > 1 else 1  # type: ignore[arg-type]


def _as_router(name: str, module: nn.Module, model: PreTrainedModel) -> RouterPlace | None:
    if not any(_ROUTER_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return None
    experts, top_k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    if experts is None and hasattr(module, "proj"):  # gemma4
        experts = getattr(module.proj, "out_features", None)
    experts = getattr(module, "n_routed_experts", experts)  # longcat: with the experts that compute nothing
    if top_k is None:
        top_k = getattr(getattr(module, "config", None), "top_k_experts", None)
    if not isinstance(experts, int) or not isinstance(top_k, int):
        return None
    return RouterPlace(name, module, experts, top_k)


def _returns_triple(place: RouterPlace, model: PreTrainedModel) -> bool:
    """Ask the router about two tokens; one that cannot be asked alone is believed, and checked when the model runs."""
    router = place.module
    takes_more = len(inspect.signature(type(router).forward).parameters) != len(("self", "hidden_states"))
    weight = next(router.parameters(), None)
    if takes_more or weight is None or weight.device.type == "meta" or router.training:
        return True
    width = model.config.get_text_config(decoder=True).hidden_size
    tokens = torch.zeros(_PROBE_TOKENS, width, dtype=activation_dtype(model), device=weight.device)
    with torch.no_grad():
        found = router.forward(tokens)  # no hook of a user's sees this
    return as_triple(found, place.experts, place.top_k) is not None


def as_triple(found: Any, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """``(logits [N, E], weights [N, K], indices [N, K])`` as a router returned them; None if it returned others.

    Granite's router returns them in reverse order up to Transformers 5.17.
    """
    if not isinstance(found, tuple) or len(found) != len(("logits", "weights", "indices")):
        return None
    if not all(isinstance(tensor, Tensor) and tensor.ndim == 2 for tensor in found):
        return None
    logits, weights, indices = found if found[0].is_floating_point() else found[::-1]
    fits = logits.shape[1] == experts and weights.shape == indices.shape and weights.shape[1] == top_k
    return (logits, weights, indices) if fits and not indices.is_floating_point() else None


def activation_dtype(model: PreTrainedModel) -> torch.dtype:
    """In which dtype routers get their states."""
    embeddings: Any = model.get_input_embeddings()
    dtype: torch.dtype = embeddings.weight.dtype
    return dtype


def _refuse(model: PreTrainedModel, kind: str, reason: str) -> ValueError:
    return ValueError(
        f"routing does not support {type(model).__name__} (model_type {kind!r}): {reason}. Supported are "
        f"{', '.join(FAMILIES)}, and models whose router returns (logits, weights, indices)"
    )
