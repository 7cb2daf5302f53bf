"""Parts of a run that processes of their own measure: one model, context, protocol and task, and a few policies."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pool import Job

from quality.config import ModelEntry, PolicyEntry, QualityConfig
from quality.harness import Keep, Only
from quality.rows import ResultFile, Row


_POLICIES = 6  # of a part: the exact cache and the control are measured in each


def cells_of(config: QualityConfig, only: Only, texts: str) -> Iterator[tuple[ModelEntry, Row]]:
    """Every model, context, protocol and task that the config and the filters name."""
    for model in config.models:
        for context in model.contexts or config.contexts:
            for task in config.tasks:
                for protocol in config.protocols:
                    cell = {"model": model.name, "dtype": model.dtype, "texts": texts, "protocol": protocol}
                    cell |= {"context": context, "task": task}
                    if all(only(key, cell[key]) for key in ("model", "context", "protocol", "task")):
                        yield model, cell


def parts_of(
    config: QualityConfig, results: ResultFile, only: Only, keep: Keep, texts: str, most: int = _POLICIES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configs of the parts; where all rows are kept, of what lacks rows.

    Args:
        config: the run.
        results: rows of earlier runs.
        only: filters.
        keep: which of these rows are kept.
        texts: what rows call the texts.
        most: policies of a part.
    """
    for model, cell in cells_of(config, only, texts):
        entries = [entry for entry in config.policies if only("policy", entry.policy)]
        if keep is Keep.ALL:
            if results.is_dropped(cell):
                continue
            entries = [entry for entry in entries if results.find({**cell, **entry.identity()}) is None]
        for number in range(0, len(entries), most):
            place = "-".join(str(cell[key]) for key in ("model", "protocol", "context", "task"))
            yield f"{place}-{number // most}", _part(config, model, cell, entries[number : number + most])


def _part(config: QualityConfig, model: ModelEntry, cell: Row, entries: Sequence[PolicyEntry]) -> dict[str, Any]:
    whole = {key: getattr(config, key) for key in ("windows", "scored_tokens", "prompts", "batch_tokens", "seed")}
    lone = replace(model, contexts=None)
    named = {key: value for key, value in vars(lone).items() if value not in (None, {})}
    return {
        **whole,
        "models": [named],
        "contexts": [cell["context"]],
        "protocols": [cell["protocol"]],
        "tasks": [cell["task"]],
        "policies": [entry.to_dict() for entry in entries],
    }


def jobs_of(parts: Iterator[tuple[str, dict[str, Any]]], folder: Path, words: Sequence[str]) -> list[Job]:
    """What measures the parts.

    Args:
        parts: names and configs.
        folder: where these and the results go.
        words: of the command, the config and ``--out`` aside.
    """
    jobs = []
    for name, part in parts:
        config, out = folder / f"{name}.config.json", folder / f"{name}.json"
        config.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
        jobs.append(Job(name, [words[0], str(config), *words[1:], "--out", str(out)], out))
    return jobs
