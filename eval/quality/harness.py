"""Decode through the real packed cache and through the exact one, on the same tokens, and compare every token.

A prompt is prefilled in one piece or 512 tokens at a time; then tokens are fed one by one, and only what comes out of
these steps is scored: the prompt's own logits see exact keys and values and would hide all damage. The exact cache's
logits are computed once for each model, context, protocol and task and serve all policies.

Gives up: sampling. An answer is scored with the right tokens fed back, which is what greedy decoding scores, too.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import Bits, MissingPackageError
from baselines.hard_models import CHANGES
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import sdpa_attention

from hf_subbyte_moe.cache import EntropySubbyteCache, attention
from hf_subbyte_moe.cli.running import load_model
from hf_subbyte_moe.ops import AttentionResult, AttentionTiles, ExactTokens
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.policy import load_calibration, remember_sidecar
from hf_subbyte_moe.scoring import decode
from quality.caches import CACHES, CONTROL, CONTROL_BITS, size_of
from quality.config import ROOT, ModelEntry, PolicyEntry, QualityConfig
from quality.rows import ResultFile, Row
from quality.scoring import Floats, TokenScores, all_right, compare, interval, joined, line_means, summary
from quality.tasks import OWN_TEXTS, TEXT, Sequences, encode, read_texts, task_prompt, task_sequences, text_sequences
from quality.unpacked import UnpackedAttention


LEAST_EXACT_SCORE = 0.5
_METERED = 16  # so many decode steps, about, tell where attention went


@dataclass
class MassMeter:
    """Where the attention of decoded tokens fell.

    Attributes:
        on: the next decode step is looked at.
        shares: ``[B]`` a layer and step: share of packed tiles, mean over query heads.
    """

    on: bool = False
    shares: list[Tensor] = field(default_factory=list)

    def mean(self) -> float | None:
        """Mean over everything seen; None for a cache that is not ours."""
        return float(torch.cat(self.shares).mean()) if self.shares else None


@contextmanager
def metered_attention() -> Iterator[MassMeter]:
    """Decode in PyTorch where kernels cannot, and measure, on chosen steps, the attention mass on packed tiles.

    The cache's own statistics are taken on the prompt, piece by piece, and can't be added up over the pieces of a
    chunked one; the log-sum-exp of a decode step with and without tiles tells the share of every scored token.
    """
    name = "decode_attention"
    meter, original, unpacked = MassMeter(), getattr(attention, name), UnpackedAttention()

    def decode_attention(
        query: Tensor, exact: ExactTokens, tiles: AttentionTiles | None, *form_and_backend: Any
    ) -> AttentionResult:
        attend = unpacked if form_and_backend[-1] == "torch" or not query.is_cuda else original
        result: AttentionResult = attend(query, exact, tiles, *form_and_backend)
        if meter.on:
            kept = result.lse
            if tiles is not None:
                kept = unpacked(query, exact, None, *form_and_backend).lse
            meter.shares.append(1 - (kept.float() - result.lse.float()).exp().mean((1, 2)))
        return result

    setattr(attention, name, decode_attention)
    try:
        yield meter
    finally:
        setattr(attention, name, original)


def load(entry: ModelEntry, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with our attention function in place, and its tokenizer.

    Raises:
        ValueError: its package is not installed or holds no GGUF file.
        FileNotFoundError: its sidecar is not there.
    """
    model: Any
    if entry.package is None:
        model, tokenizer = load_model(entry.path)
    else:
        spec = importlib.util.find_spec(entry.package)
        files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not files:
            raise ValueError(f"models.package={entry.package!r} is not installed or holds no .gguf file")
        folder, name = files[0].parent, files[0].name
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device=device, dtype=getattr(torch, entry.dtype))
    for name, size in entry.change.items():
        CHANGES[name](model, size)
    use_packed_attention(model)
    if on_gpu_in_fp32(model):
        # PyTorch's fused attention takes fp32 with a KV head for every query head only; for groups it forms the matrix
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    if entry.sidecar is not None:
        load_calibration(ROOT / entry.sidecar)
        remember_sidecar(model.config.name_or_path, ROOT / entry.sidecar)
    return model, tokenizer


def on_gpu_in_fp32(model: PreTrainedModel) -> bool:
    """Where PyTorch's attention and our kernels have another fastest way than in bf16."""
    return model.device.type == "cuda" and model.dtype == torch.float32


def head_dim_of(model: PreTrainedModel) -> int:
    """Width of a key."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def make_cache(model: PreTrainedModel, entry: PolicyEntry) -> Cache:
    """An empty cache of a policy.

    Raises:
        ValueError: it does not fit the model; names the policy.
        MissingPackageError: it needs a package that is not installed.
    """
    config = model.config.get_text_config(decoder=True)
    if entry.baseline is not None:
        return entry.baseline.cache(config)
    # the CUDA kernel takes no fp32, and Triton compiles for every new set of tiers: minutes in a table of policies
    backend = "torch" if on_gpu_in_fp32(model) else "auto"
    if entry.cache is not None:
        return CACHES[entry.cache](config, backend)
    try:
        return EntropySubbyteCache(config, **{"backend": backend, **entry.cache_options(head_dim_of(model))})
    except ValueError as error:
        raise ValueError(f"policy {entry.policy!r}, code_bits {entry.code_bits}: {error}") from None


def _batches(sequences: Sequences, batch_tokens: int, device: torch.device) -> list[Tensor]:
    """``[B, prefill + S]`` ids on the device."""
    rows = max(1, batch_tokens // sequences.ids.shape[1])
    return [ids.to(device) for ids in sequences.ids.split(rows)]


def exact_logits(
    model: PreTrainedModel, sequences: Sequences, protocol: str, batch_tokens: int, name: str = "exact"
) -> list[Tensor]:
    """``[B, S, V]`` fp32 logits of the plain cache, batch by batch, on the model's device."""
    config = model.config.get_text_config(decoder=True)
    logits = []
    for ids in tqdm(_batches(sequences, batch_tokens, model.device), desc=name, unit="batch", leave=False):
        steps = decode(model, ids, sequences.prefill, DynamicCache(config=config), protocol)
        logits.append(torch.cat(list(steps), dim=1))
    return logits


@dataclass(frozen=True)
class Measured:
    """A policy on one cell's sequences.

    Attributes:
        scores: every scored token.
        mass: share of the scored tokens' attention that fell on packed tiles; None for a cache that is not ours.
        code_bits: codes alone, bits a packed value, after the prompt; None without tiles or for such a cache.
        bits: with scales and outliers; None likewise.
        bits_total: everything held, bits a cached value; None for such a cache.
        bits_total_16: the same with exact tokens at 16 bits a value, whatever the model's dtype.
    """

    scores: TokenScores
    mass: float | None
    code_bits: float | None
    bits: float | None
    bits_total: float | None
    bits_total_16: float | None


def measure(
    model: PreTrainedModel,
    sequences: Sequences,
    exact: Sequence[Tensor],
    entry: PolicyEntry,
    protocol: str,
    batch_tokens: int,
    name: str = "",
) -> Measured:
    """Decode all sequences through a policy's cache and compare with the exact logits, step by step."""
    parts: list[TokenScores] = []
    sizes: list[Bits] = []
    done = 0
    with metered_attention() as meter:

        def before(step: int) -> None:
            meter.on = step % max(1, sequences.targets.shape[1] // _METERED) == 0
            size = size_of(cache) if not step else None
            if size is not None:
                sizes.extend([size] * len(ids))  # each row counts once

        batches = _batches(sequences, batch_tokens, model.device)
        for ids, reference in zip(tqdm(batches, desc=name, unit="batch", leave=False), exact, strict=True):
            lines = slice(done, done + len(ids))
            done += len(ids)
            targets = sequences.targets[lines].to(model.device)
            counted = sequences.counted[lines].to(model.device)
            cache = make_cache(model, entry)
            steps = decode(model, ids, sequences.prefill, cache, protocol, before=before)
            compared = []
            for step, logits in enumerate(steps):
                now = slice(step, step + 1)
                compared.append(compare(reference[:, now], logits, targets[:, now], counted[:, now]))
            meter.on = False  # the next batch's prompt is not looked at
            parts.append(joined(compared, axis=1))

    def mean(key: str) -> float | None:
        known = [getattr(size, key) for size in sizes if getattr(size, key) is not None]
        return float(np.mean(known)) if known else None

    packed = [mean(key) for key in ("code_bits", "bits")]
    if entry.cache == CONTROL:  # what its codes say; it is stored in the format of another tier
        packed = [None if bits is None else bits - (packed[0] or 0) + CONTROL_BITS for bits in packed]
    totals = [mean(key) for key in ("bits_total", "bits_total_16")]
    return Measured(joined(parts, axis=0), meter.mean(), *packed, *totals)


class Keep(Enum):
    """Rows of an earlier run that are not measured again."""

    NOTHING = "nothing"
    SAME = "rows of the same commit and size"
    ALL = "all rows"


class Only:
    """Filters ``key=value``: of one key any value will do, of several keys all must fit."""

    _KEYS = ("model", "context", "protocol", "task", "policy")

    def __init__(self, filters: Sequence[str]) -> None:
        """Read filters; raises ValueError for an unknown key."""
        self._wanted: dict[str, set[str]] = {}
        for text in filters:
            key, _, value = text.partition("=")
            if key not in self._KEYS or not value:
                raise ValueError(f"--only {text!r} is not possible: say KEY=VALUE with a key of {list(self._KEYS)}")
            self._wanted.setdefault(key, set()).add(value)

    def __call__(self, key: str, value: object) -> bool:
        return key not in self._wanted or str(value) in self._wanted[key]


class Run:
    """One run of a config; :meth:`go` fills the result file.

    Attributes:
        rows: measured by this run.
        dropped: cells that the exact cache failed in this run.
        skipped: policies that need a package that is not installed, and why.
    """

    def __init__(
        self, config: QualityConfig, results: ResultFile, device: str | None, commit: str, only: Only, keep: Keep
    ) -> None:
        """See ``eval/run.py``."""
        self._config, self._results, self._device = config, results, device
        self._commit, self._only, self._kept = commit, only, keep
        self.rows: list[Row] = []
        self.dropped: list[Row] = []
        self.skipped: dict[str, str] = {}
        path = None if config.texts is None else Path(config.texts)
        self._texts = read_texts(path, ROOT)
        self._texts_name = OWN_TEXTS if path is None else path.name
        # first the control: a run that is cut off can still be judged
        self._entries = [
            PolicyEntry(policy=CONTROL, cache=CONTROL),
            *(entry for entry in config.policies if entry.cache != CONTROL and only("policy", entry.policy)),
        ]

    def go(self) -> None:
        """Measure everything that the config and the filters name.

        Raises:
            ValueError: a model that is not there, or a policy that does not fit it.
        """
        for entry in self._config.models:
            if self._only("model", entry.name):
                model, tokenizer = load(entry, self._device)
                for policy in list(self._entries):
                    self._try_out(model, policy)
                self.measure_model(entry, model, tokenizer)

    def _try_out(self, model: PreTrainedModel, policy: PolicyEntry) -> None:
        """Wrong options fail before the wait; what is not installed is left out, and said."""
        try:
            make_cache(model, policy)
        except MissingPackageError as missing:
            self._entries.remove(policy)
            self.skipped[policy.policy] = str(missing)
            tqdm.write(f"skipped: {policy.policy}: {missing}")

    def measure_model(self, entry: ModelEntry, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """All contexts, tasks and protocols of a model."""
        stream = [token for text in self._texts for token in encode(tokenizer, text)]
        for context in entry.contexts or self._config.contexts:
            for task in self._config.tasks:
                if not (self._only("context", context) and self._only("task", task)):
                    continue
                sequences = self._sequences(tokenizer, stream, context, task)
                for protocol in self._config.protocols:
                    if self._only("protocol", protocol):
                        cell = {
                            "model": entry.name,
                            "dtype": entry.dtype,
                            "texts": self._texts_name,
                            "protocol": protocol,
                            "context": context,
                            "task": task,
                        }
                        self._measure_cell(model, sequences, cell)

    def _sequences(self, tokenizer: PreTrainedTokenizerBase, stream: list[int], context: int, task: str) -> Sequences:
        config = self._config
        if task == TEXT:
            start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            return text_sequences(stream, start, context, config.scored_tokens, config.windows, config.seed)
        prompts = [
            task_prompt(tokenizer, stream, task, context, config.seed, number)
            for number in tqdm(range(config.prompts), desc=f"{task} {context}", unit="prompt", leave=False)
        ]
        return task_sequences(prompts)

    def _measure_cell(self, model: PreTrainedModel, sequences: Sequences, cell: Row) -> None:
        """All policies on the same tokens; nothing but a note where even the exact cache fails."""
        asked = [(entry, {**cell, **entry.identity()}) for entry in self._entries]
        known = [None if self._kept is Keep.NOTHING else self._results.find(row) for _, row in asked]
        size = (self._commit, len(sequences), int(sequences.counted.sum()))
        done = [
            row is not None and (self._kept is Keep.ALL or (row["commit"], row["n"], row["tokens"]) == size)
            for row in known
        ]
        if self._kept is Keep.ALL and self._results.is_dropped(cell):
            return
        if all(done):
            self.rows += [row for row in known if row is not None]
            return
        done[0] = False  # what the others are held against: the control, text by text
        config, answers = self._config, cell["task"] != TEXT
        place = " ".join(str(cell[key]) for key in ("model", "protocol", "context", "task"))
        exact = exact_logits(model, sequences, cell["protocol"], config.batch_tokens, f"{place} exact")
        if answers:
            top = torch.cat([logits.argmax(-1) for logits in exact]).cpu()
            score = float(all_right((top == sequences.targets).numpy(), sequences.counted.numpy()).mean())
            if score < LEAST_EXACT_SCORE:
                dropped = {**cell, "score_exact": score, "n": len(sequences), "commit": self._commit}
                self.dropped.append(dropped)
                self._results.drop(dropped)
                return
        control: Floats | None = None
        for (entry, row), kept, old in zip(asked, done, known, strict=True):
            if kept and old is not None:
                self.rows.append(old)
                continue
            name = f"{place} {entry.policy}"
            found = measure(model, sequences, exact, entry, cell["protocol"], config.batch_tokens, name)
            kl = line_means(found.scores.kl, found.scores.counted)
            margin = None if control is None else interval(control - kl, config.seed)
            control = kl if control is None else control
            self._keep({**row, **self._figures(found, model, answers), "control_margin": margin})

    def _figures(self, found: Measured, model: PreTrainedModel, answers: bool) -> Row:
        on_gpu = model.device.type == "cuda"
        return {
            "code_bits": found.code_bits,
            "bits": found.bits,
            "bits_total": found.bits_total,
            "bits_total_16": found.bits_total_16,
            **summary(found.scores, self._config.seed, answers),
            "mass": found.mass,
            "seeds": [self._config.seed],
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "commit": self._commit,
        }

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self._results.add(row)
