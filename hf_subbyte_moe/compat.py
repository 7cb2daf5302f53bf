"""The only file that knows Transformers versions.

5.24 renamed the cache argument of models and ``generate`` from ``past_key_values`` to ``cache``. In 5.17 expert
parallelism is a style of tensor parallelism whose router masks what other ranks hold; 5.24 has a registry of ways to
bring tokens to experts. In 5.17 layers without attention have a cache layer that is never used. Everything else that
this package uses is the same from 5.17 on.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.distributed import tensor_parallel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.generation.utils import GenerationMixin


try:
    from transformers.distributed import expert_parallel
except ImportError:
    _dispatchers: Any = None
else:
    _dispatchers = expert_parallel.EPImplementationInterface


CACHE_KW: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def cache_of(output: Mapping[str, Any]) -> Any:
    """The cache that a model or ``generate(return_dict_in_generate=True)`` returned."""
    return output[CACHE_KW]


def last_storing_layer(config: PreTrainedConfig, layers: Sequence[Any]) -> int:
    """Index of the last cache layer that stores anything.

    Layers without attention have a dummy in 5.24, and in 5.17 a layer of linear attention that is never used.
    """
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    return max(
        index
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=False))
        if kind not in ("moe", "mlp") and type(layer).__name__ != "DummyLayer"
    )


Dispatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MakeDispatch = Callable[[torch.nn.Module, Any], Dispatch]


def register_dispatch(name: str, make: MakeDispatch) -> None:
    """Make a way to bring tokens to experts known to expert parallelism; harmless when repeated.

    Args:
        name: for :func:`dispatch_config`.
        make: from an experts module that holds this rank's experts and the process group, what is called with hidden
            states ``[N, H]``, experts ``[N, K]`` counted over all ranks, and their weights.
    """
    if _dispatchers is not None:
        _dispatchers.register(name, lambda experts, ep_mesh, tp_mesh: make(experts, _shared_group(ep_mesh, tp_mesh)))
        return

    styles: Any = tensor_parallel  # Any: what it exports differs between releases

    class _Style(styles.MoeExpertsParallel):  # type: ignore[misc]
        def install_forward(self, module: Any, mesh: Any, **_: Any) -> Any:
            dispatch = make(module, mesh.get_group())

            def forward(hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: Any) -> torch.Tensor:
                plain = [x.to_local() if hasattr(x, "to_local") else x for x in (hidden_states, top_k_weights)]
                with self.context_around_forward(module, mesh):
                    return dispatch(plain[0], top_k_index, plain[1])

            module.forward = forward
            return module

    styles.ALL_PARALLEL_STYLES.register(name, _Style())


def _shared_group(ep_mesh: Any, tp_mesh: Any) -> Any:
    groups = [mesh.get_group() for mesh in (ep_mesh, tp_mesh)]
    first, second = (torch.distributed.get_process_group_ranks(group) for group in groups)
    if first != second:
        raise ValueError("clusters of experts need ranks that see the same tokens: ep_size must be tp_size, not more")
    return groups[0]


def dispatch_config(config: PreTrainedConfig, name: str, ranks: int) -> DistributedConfig:
    """Expert parallelism over ``ranks`` ranks that share attention heads and tokens, by a registered dispatch.

    Raises:
        ValueError: the model has no expert-parallel plan.
    """
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_ep_plan", None)
    if not plan:
        raise ValueError(f"Transformers has no expert-parallel plan for model type {text.model_type!r}")
    if _dispatchers is not None:
        return DistributedConfig(tp_size=ranks, ep_size=ranks, tp_plan="auto", ep_implementation=name)
    styles = dict(text.base_model_tp_plan or {})
    styles.update({key: style for key, style in plan.items() if style != "ep_router"})
    styles.update({key: name for key, style in plan.items() if style == "moe_tp_experts"})
    return DistributedConfig(tp_size=ranks, tp_plan={f"model.{key}": style for key, style in styles.items()})
