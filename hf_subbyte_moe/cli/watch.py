"""``hf-subbyte-moe explain --watch``: a live view of experts outside the GPU while a model generates."""

from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_subbyte_moe
from hf_subbyte_moe.experts.report import experts_state, experts_tables


_TIMES_A_SECOND = 4


class _View(BaseStreamer):
    """Shows the tables anew with every token.

    Args:
        model: that generates.
        live: where they are shown.
    """

    def __init__(self, model: PreTrainedModel, live: Live) -> None:
        self._model, self._live = model, live

    def put(self, value: Tensor) -> None:
        state = experts_state(self._model)
        assert state is not None
        self._live.update(experts_tables(state))

    def end(self) -> None:
        """The last view stays."""


def watch_experts(
    console: Console, model: PreTrainedModel, ids: Tensor, options: dict[str, Any], new_tokens: int
) -> None:
    """Generate with placed experts, and show what they do.

    Args:
        console: where.
        model: a MoE model.
        ids: ``[1, T]`` prompt.
        options: the section ``experts``.
        new_tokens: to generate.
    """
    hf_subbyte_moe.apply(model, {"experts": options})
    generate: Any = model.generate
    with Live(console=console, refresh_per_second=_TIMES_A_SECOND) as live, torch.no_grad():
        generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=_View(model, live),
        )
