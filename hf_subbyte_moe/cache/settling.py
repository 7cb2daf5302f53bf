"""What becomes of a layer's new tokens after their attention call: they are measured, then stored and packed.

Where the host would have to wait between the two, as for a GPU, it goes on with the model: a layer's tokens are stored
and packed after the next layer's attention call, or when anybody asks for the layer's rows. Until then the GPU has
work to do; a first prompt is measured beside it, on a stream of its own, as that takes many small kernels. A wait is
also what it takes to look for NaN and Inf, so tokens are looked at then, too.

Gives up: all groups of a layer's rows are measured before any is stored, so one layer's exact keys and values more
are held meanwhile, and up to two where rows are padded or a prompt comes in pieces, as these are copied; ranks that
share heads wait at once. Of a layer that is dropped before it is packed, as by ``generate(max_new_tokens=1)``, the
numbers stay, and if its keys needed factors, they are told as measured without. Tokens may be packed on another stream
than their prompt's, if one thread does both; what is packed already is the caller's to wait for, as any tensor is. All
caches of a GPU measure on one stream, which keeps some of its memory for itself.
"""

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.cache.packing import PackedRows
from hf_subbyte_moe.cache.prompts import LayerStatistics, MeasuredNumbers, MeasuredPrompt, PromptQueries, Snapshot
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.transfers import Answers, following, waits_cost


if TYPE_CHECKING:
    from hf_subbyte_moe.cache.journal import StepJournal


class SettlingLayer(CacheLayerMixin):
    """New tokens of one layer, from their attention call on.

    Attributes:
        length: columns, padding included.
        starts: ``[B]`` padding columns of each row.
        statistics: what was measured and chosen.
        before: what the layer was before tokens that are not stored yet.
        journal: of the cache that the layer belongs to.
    """

    length: int
    starts: Ints
    statistics: LayerStatistics
    before: Snapshot | None
    journal: "StepJournal | None" = None
    _rows: PackedRows
    _pending: tuple[Tensor, Tensor] | None
    _measured: MeasuredPrompt | None = None

    @property
    def rows(self) -> PackedRows:
        """The stored tokens; they exist from the first update on.

        Raises:
            ValueError: the last prompt holds NaN or Inf; see :meth:`finish_packing`.
        """
        self.finish_packing()
        return self._rows

    @property
    def is_settled(self) -> bool:
        """No token waits for its attention call, or for being packed after it."""
        return self._pending is None and self._measured is None

    @property
    def is_pending(self) -> bool:
        """New tokens wait for their attention call."""
        return self._pending is not None

    @property
    def pending(self) -> tuple[Tensor, Tensor]:
        """New keys and values ``[B, H, q, D]`` that wait for their attention call."""
        assert self._pending is not None
        return self._pending

    def take_back(self) -> None:
        """The attention call of the newest tokens failed: they were never here, in no layer of the cache."""
        in_cache = self.journal is not None and self.journal.take_back()
        if not in_cache and self.before is not None:
            self.undo(self.before)

    def finish(self) -> None:
        """The attention call of the newest tokens is over."""
        if self.journal is not None:
            self.journal.finish()

    def undo(self, before: Snapshot) -> None:
        """Go back to what the layer was before its last update."""
        self.before = self._pending = None
        self._take_measured()
        if before.rows is None:
            self.reset()
            return
        self.length, self.starts = before.length, before.starts
        self.rows.undo(before.rows)

    def settle(self, queries: PromptQueries | None) -> None:
        """Store the pending tokens and pack what is due, measured with the queries that came with them.

        Where it costs to wait for what was measured, :meth:`finish_packing` does the rest.

        Raises:
            ValueError: tokens of the layer before hold NaN or Inf; see :meth:`finish_packing`.
        """
        key_states, value_states = self.pending
        if self.journal is not None:
            self.journal.finish_packing()
        self._pending = None
        behind = key_states.shape[2] - np.maximum(self.starts - self.length + key_states.shape[2], 0)  # the padding
        groups = self.rows.alike([(row, new) for row, new in enumerate(behind.tolist()) if new > 0], self.length)
        # ranks measure together, and one of them alone may have to measure again
        ahead = waits_cost(key_states) and self.rows.ranks is None
        for together in [groups] if ahead else [[rows] for rows in groups]:
            self._measured = self._measure(key_states, value_states, together, behind, queries, ahead)
            if not ahead:
                self._store_measured()
        if not ahead:
            self._settled()
            return
        assert self._measured is not None
        self.statistics.finish = partial(_choose, weakref.ref(self), self._measured.numbers)
        if self.journal is not None:
            self.journal.waiting = self

    def _measure(
        self,
        key_states: Tensor,
        value_states: Tensor,
        groups: Sequence[RowGroup],
        behind: Ints,
        queries: PromptQueries | None,
        ahead: bool,
    ) -> MeasuredPrompt:
        """Measure new tokens ``[B, H, q, D]`` of some rows, of which ``behind`` are behind a row's padding."""
        answers, adding, choices = Answers(), [], []
        unseen = (key_states, value_states) if waits_cost(key_states) else ()
        finite = answers.ask(*(torch.isfinite(states).all() for states in unseen))
        for rows in groups:
            count = int(behind[rows.first])
            new = slice(key_states.shape[2] - count, None)
            states = (key_states[rows.index][:, :, new], value_states[rows.index][:, :, new])
            total = int(self.rows.lengths[rows.first]) + count
            theirs = None if queries is None else queries.of(rows.index, count, total)
            adding.append(self.rows.add(rows, *states, theirs, answers, ahead))
            choose = next(adding[-1])
            if choose is not None:
                choices.append(choose)
        answers.send()
        layer = "a layer" if self.journal is None else f"layer {self.journal.index(self)}"
        stream = torch.cuda.current_stream(key_states.device) if key_states.is_cuda else None
        return MeasuredPrompt(adding, MeasuredNumbers(layer, finite, choices), stream)

    def finish_packing(self) -> None:
        """Pack what was measured, if anything waits for that.

        Raises:
            ValueError: tokens hold NaN or Inf; the step that brought them is taken back in all layers.
        """
        if self._measured is None:
            return
        try:
            self._store_measured()
        except BaseException:  # whatever it is: no layer may keep half a step
            self.take_back()
            raise
        self._settled()

    def _store_measured(self) -> None:
        measured = self._take_measured()
        assert measured is not None
        measured.numbers.check()
        with following(measured.stream):
            for adding in measured.groups:
                next(adding, None)

    def _take_measured(self) -> MeasuredPrompt | None:
        """What waits for being packed; nothing does any more."""
        measured, self._measured, self.statistics.finish = self._measured, None, None
        return measured

    def _settled(self) -> None:
        self.before = None
        self.finish()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which hold nothing that waits."""
        self.finish_packing()
        return vars(self)

    def settle_without_statistics(self) -> None:
        """Store the pending tokens, if any, by prior knowledge alone: our attention function was not called."""
        if self._pending is None:
            return
        warnings.warn(
            "the model did not call the entropy_subbyte attention function, so nothing was measured and every head "
            "gets its tiers by prior knowledge; use hf_subbyte_moe.apply(model) or model.generate()",
            stacklevel=3,
        )
        self.settle(None)


def _choose(layer: "weakref.ref[SettlingLayer]", numbers: MeasuredNumbers) -> None:
    """Choose what a prompt's tiers are, and pack it, if its layer is still there."""
    there = layer()
    if there is None:
        numbers.choose()
    else:
        there.finish_packing()
