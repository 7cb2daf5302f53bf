"""The benchmark of experts and routers, as far as it needs no GPU."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from subbyte_kernels import nvrtc
from subbyte_kernels.expert_mlp import ExpertCall, ExpertLayout, config, expert_mlp_reference
from subbyte_kernels.expert_mlp.cuda_kernel import SOURCE, variant_of
from support.scripts import BENCHMARKS, scripts_of


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
    "tune_moe",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with scripts_of(BENCHMARKS, *SCRIPTS) as found:
        yield found


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


def test_rows_that_are_not_measured_again_stay(scripts: Any, tmp_path: Path) -> None:
    def row(tokens: int, commit: str) -> dict[str, Any]:
        return {"model": "a", "weights": "int4", "tokens": tokens, "backend": "cuda", "commit": commit}

    path = tmp_path / "expert_mlp.json"
    scripts.moe.keep_rows({"device": "x"}, [row(1, "old"), row(2, "old")], path)
    scripts.moe.keep_rows({"device": "y"}, [row(2, "new")], path)
    assert json.loads(path.read_text()) == {"conditions": {"device": "y"}, "rows": [row(1, "old"), row(2, "new")]}


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


def step_of(scripts: Any, name: str, tokens: int = 1) -> ExpertCall:
    """A call of Qwen3-30B-A3B's shape, without weights."""
    model, (kind, group) = scripts.moe.MODELS[0], scripts.moe.FORMATS[name]
    layout = ExpertLayout(kind, model.hidden, model.intermediate, torch.bfloat16, group)
    hidden, chosen = torch.zeros(tokens, model.hidden, dtype=torch.bfloat16), torch.zeros(tokens, model.top_k)
    return ExpertCall(hidden, chosen.long(), chosen, torch.zeros(1, 1), torch.zeros(1, 1), layout)


@pytest.mark.parametrize("name", ["bf16", "int4", "fp8"])
@pytest.mark.parametrize("down", [False, True])
def test_cuts_to_try_fit_and_compile(scripts: Any, name: str, down: bool) -> None:
    call = step_of(scripts, name)
    start = config.default_config(call.layout, 1, down)
    near = [*scripts.tune_moe.neighbours(call, down, start)]
    far = scripts.tune_moe.scattered(call, down, False, 12)
    assert len(set(near)) == len(near) >= 6
    assert len(set(far)) == 12
    assert far == scripts.tune_moe.scattered(call, down, False, 12)
    for cut in near:
        assert 1 <= sum(getattr(cut, key) != value for key, value in dataclasses.asdict(start).items()) <= 2
    assert all(scripts.tune_moe.fits(call, down, cut) for cut in near + far)
    pytest.importorskip("cuda.bindings.nvrtc", reason="pip install 'hf-subbyte-moe[cuda]'")
    if name == "int4":
        far[0] = dataclasses.replace(far[0], fixed=True)
    for cut in far[:2]:
        text = nvrtc.full_text(SOURCE, variant_of(call, down, cut).defined())
        assert nvrtc.compile_source(text, SOURCE.name, "sm_90")


def test_a_walk_ends_at_the_fastest_cut_and_keeps_what_failed(scripts: Any) -> None:
    call = step_of(scripts, "int4")
    best = (config.CudaConfig(4, 4, 2, 6, 6, 2), config.CudaConfig(8, 4, 2, 8, 4, 1))
    timed = []

    def time_of(pair: Any) -> tuple[float | None, str | None]:
        timed.append(pair)
        if pair[0].producers == 4:
            return None, "too many producers"
        far = 0
        for cut, wanted in zip(pair, best, strict=True):
            far += sum(abs(getattr(cut, key) - value) for key, value in dataclasses.asdict(wanted).items())
        return 100.0 + far, None

    start = [tuple(config.default_config(call.layout, 1, down) for down in (False, True))]
    walk = scripts.tune_moe.Walk(call, time_of)
    assert walk.go(start, lambda: True) == (best, 100.0)
    assert len(set(timed)) == len(timed) == len(walk.lines)
    assert any(line["us"] is None and line["failed"] == "too many producers" for line in walk.lines)
    asked = iter([True, True, False])
    stopped = scripts.tune_moe.Walk(call, time_of)
    assert stopped.go(start, lambda: next(asked)) is not None
    assert len(stopped.lines) == 3
    assert scripts.tune_moe.Walk(call, lambda _: (None, "broken")).go(start, lambda: True) is None


def test_winners_are_what_the_kernel_takes(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, path = step_of(scripts, "int4").layout, tmp_path / "configs.json"
    old = (config.CudaConfig(8, 4, 2, 4, 4), config.CudaConfig(8, 4, 2, 4, 4))
    new = (config.CudaConfig(4, 4, 1, 4, 8, 4), config.CudaConfig(4, 4, 1, 6, 8, 2))
    other = ExpertLayout(layout.format, 4096, layout.intermediate, layout.dtype, layout.group)
    for kept, pair in ((layout, old), (other, old), (layout, new)):
        scripts.tune_moe.keep_configs(path, "some GPU", kept, 1, pair, 12.345)
    rows = json.loads(path.read_text())["some GPU"]
    assert len(rows) == 4
    assert {row["us"] for row in rows} == {12.35}
    monkeypatch.setattr(config, "_TUNED", path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    config._tuned.cache_clear()
    config.choose_config.cache_clear()
    assert tuple(config.choose_config(0, layout, 1, down) for down in (False, True)) == new
    assert config.choose_config(0, other, 1, False) == old[0]
    config._tuned.cache_clear()
    config.choose_config.cache_clear()
