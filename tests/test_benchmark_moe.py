"""The benchmark of experts and routers, as far as it needs no GPU."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subbyte_kernels.expert_mlp import ExpertLayout, expert_mlp_reference


FOLDER = Path(__file__).parents[1] / "kernels" / "benchmarks"
SCRIPTS = (
    "shapes",
    "inputs",
    "gate",
    "timing",
    "baselines",
    "results",
    "plot",
    "limits",
    "tune",
    "run",
    "moe",
    "moe_report",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in SCRIPTS})
        for name in SCRIPTS:
            sys.modules.pop(name)


@pytest.fixture
def run(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(scripts.timing.Clock, "copy_gbs", lambda *_: 1.0)
    monkeypatch.setattr(scripts.timing.Clock, "time", lambda *_: scripts.timing.Timing(2.0, 3.0, graph=False))
    return scripts.moe.Run(CPU)


def test_rows_are_checked_and_count_what_is_read(scripts: Any, run: Any) -> None:
    (model,) = scripts.moe.SMALL
    for name in model.formats:
        run.model(model, name, (1, 3))
    assert [(line["weights"], line["tokens"]) for line in run.experts] == [
        (name, tokens) for name in ("bf16", "int4", "fp8") for tokens in (1, 3)
    ]
    for line in run.experts:
        assert line["failed"] is None
        assert line["us"] == 2.0
        assert line["error_ratio"] < 1.5
        assert line["copy_share"] == pytest.approx(line["bytes"] / 2000)
    one = run.experts[0]
    assert one["distinct"] == model.top_k
    assert one["bytes"] == model.top_k * 3 * model.hidden * model.intermediate * 2


def test_what_is_not_right_has_no_time(scripts: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.moe, "expert_mlp", lambda call, *_: 1.1 * expert_mlp_reference(call))
    monkeypatch.setattr(scripts.moe, "router", lambda *given, **_: flipped(*given))
    flip = scripts.moe.router_reference

    def flipped(states: Any, matrix: Any, spec: Any) -> Any:
        found = flip(states, matrix, spec)
        return type(found)(found.logits, found.weights, (found.index + 1) % 16, None)

    run.model(scripts.moe.SMALL[0], "bf16", (1,))
    run.route(scripts.moe.SMALL_ROUTERS[0], (1,))
    assert "times PyTorch's" in run.experts[0]["failed"]
    assert run.routers[0]["failed"] == "it chooses other experts from equal logits"
    assert run.experts[0]["us"] is None is run.routers[0]["us"]


def test_random_slabs_hold_plausible_weights(scripts: Any) -> None:
    for kind, group in scripts.moe.FORMATS.values():
        layout = ExpertLayout(kind, 64, 96, torch.bfloat16, group)
        for weights in layout.unpack(*layout.views(scripts.moe.random_slabs(layout, 2, CPU))):
            assert weights.isfinite().all()
            assert 0.005 < weights.float().std() < 1.0


def test_tables(scripts: Any, run: Any, tmp_path: Path) -> None:
    run.model(scripts.moe.SMALL[0], "bf16", (1,))
    run.route(scripts.moe.SMALL_ROUTERS[0], (3,))
    page = "a\n<!-- table: expert_mlp -->\nold\n<!-- end table -->\nb\n<!-- table: router -->\n<!-- end table -->\n"
    assert scripts.moe_report.rendered(page, tmp_path).count("Not measured yet.") == 2
    for name, rows in (("expert_mlp", run.experts), ("router", run.routers)):
        scripts.results.save({"conditions": run.conditions, "rows": rows}, tmp_path / f"{name}.json")
    made = scripts.moe_report.rendered(page, tmp_path)
    assert "old" not in made
    assert "| small | bf16 | torch | 1 | 2.0 | 2.0 | 3.0 |" in made
    assert "| small | torch | 3 | 2.00 | 3.00 | 0.096 | 100.00% |" in made
    assert "0 rows failed." in made
    with pytest.raises(KeyError):
        scripts.moe_report.rendered("<!-- table: other -->\n<!-- end table -->\n", tmp_path)


def test_the_kernels_page_shows_the_result_files(scripts: Any) -> None:
    page = scripts.results.README.read_text(encoding="utf-8")
    assert scripts.moe_report.rendered(page, scripts.results.RESULTS) == page
