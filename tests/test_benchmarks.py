"""The benchmark scripts, as far as they need no GPU."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from subbyte_kernels.decode_attention import decode_attention_reference
from subbyte_kernels.formats import TILE_TOKENS, page_slots, page_tiers
from support.scripts import BENCHMARKS, scripts_of


SCRIPTS = ("shapes", "inputs", "gate", "timing", "baselines", "results", "plot", "limits", "tune", "run")
CPU = torch.device("cpu")
CONDITIONS = {
    "device": "a device",
    "torch": "2",
    "triton": "3",
    "driver": "500",
    "commit": "abc1234",
    "date": "2026-01-01",
    "copy_gbs": 4000.0,
    "timing": "with care",
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with scripts_of(BENCHMARKS, *SCRIPTS) as found:
        yield found


def small(scripts: Any, context: int = 4640) -> Any:
    return scripts.shapes.Cell(scripts.shapes.Shape("small", query_heads=8, heads=4, head_dim=64), 2, context)


def test_tokens_add_up_to_the_context(scripts: Any) -> None:
    for cell in [*scripts.shapes.grid(), *scripts.shapes.smoke_grid()]:
        assert 128 <= cell.recent < 256
        assert scripts.shapes.SINKS + cell.recent + TILE_TOKENS * cell.tiles == cell.context
    assert len(scripts.shapes.grid()) == 18 + len(scripts.shapes.OTHER_SHAPES)


@pytest.mark.parametrize("context", [300, 1000])
def test_an_input_attends_to_the_whole_context_and_reads_every_record_once(scripts: Any, context: int) -> None:
    cell = small(scripts, context)
    given = scripts.inputs.packed_input(cell, scripts.shapes.MIX, CPU, seed=1)
    exact = given.exact.visible.sum(-1)
    assert (exact + TILE_TOKENS * given.tiles.values.pages.shape[-1] == context).all()
    records = 0
    for side in (*given.tiles.keys, given.tiles.values):
        for tier_id, pool in side.pools.items():
            slots = page_slots(side.pages[page_tiers(side.pages) == tier_id])
            assert sorted(slots.tolist()) == list(range(len(pool)))
            assert pool.shape[1] == side.formats[tier_id].record_words(cell.shape.head_dim)
            records += 4 * pool.numel()
    token = cell.shape.heads * 2 * cell.shape.head_dim * 2
    assert scripts.inputs.packed_bytes(given) == records + int(exact.sum()) * token


def test_random_codes_are_finite_and_as_large_as_random_numbers(scripts: Any) -> None:
    cell = small(scripts, 1000)
    for variant in scripts.shapes.variants(cell, all_pairs=True):
        given = scripts.inputs.packed_input(cell, variant, CPU, seed=2)
        for states in scripts.inputs.dequantized(given, row=1, head=2):
            assert states.shape == (1000, 64)
            assert states.isfinite().all()
            assert 0.8 < states.square().mean().sqrt() < 1.5


def test_what_holds_more_than_codes_and_scales_has_no_random_records(scripts: Any) -> None:
    for name in ("exact", "nuq2", "vq3o"):
        fmt = scripts.inputs.get_codec(name).format
        with pytest.raises(ValueError, match=f"no random records of tier '{name}'"):
            scripts.inputs.random_records(fmt, 1, 64, scripts.inputs.generator(CPU, 0))


def test_input_sets_outgrow_the_l2_cache(scripts: Any) -> None:
    wanted, device = scripts.inputs.sets_wanted, torch.device("cuda")
    assert all(size * wanted(size, device) > 4 * 60e6 for size in (2_400_000, 60_000_000, 10**9))
    assert wanted(10**9, device) == 2
    assert wanted(10**11, device) == 1


def test_the_mixture_averages_two_and_a_half_bits_of_codes(scripts: Any) -> None:
    mix = scripts.shapes.MIX
    for cell in scripts.shapes.grid():
        assert mix.code_bits(cell) == pytest.approx(2.5)
    cell = small(scripts)
    given = scripts.inputs.packed_input(cell, mix, CPU, seed=3)
    sides = (*given.tiles.keys, given.tiles.values)
    bits = [
        side.formats[tier].code_bits_per_value()
        for side in sides
        for tier in page_tiers(side.pages).flatten().tolist()
    ]
    assert sum(bits) / len(bits) == pytest.approx(2.5)
    assigned = mix.assign(cell)
    assert (assigned[:, :, :32] == assigned[:, :, :1]).all()
    assert (assigned[:, 0, 0] != assigned[:, 1, 0]).all()
    assert (assigned[:, :, 0] != assigned[:, :, 32]).any()


def test_the_mixture_consists_of_pairs_that_are_timed(scripts: Any) -> None:
    shapes = scripts.shapes
    names = {variant.name for variant in shapes.variants(shapes.Cell(shapes.MIXTRAL, 8, 131072))}
    assert {pair.name for pair in shapes.MIX.pairs} <= names
    assert [variant.name for variant in shapes.variants(shapes.Cell(shapes.QWEN3, 8, 8192))] == [
        "vq175/vq175",
        "vq2/vq2",
        "mix-2.5",
    ]


def test_the_gate_passes_the_reference_and_nothing_worse_than_bf16(scripts: Any) -> None:
    cell = small(scripts, 1000)
    given = scripts.inputs.packed_input(cell, scripts.shapes.MIX, CPU, seed=4)
    gate = scripts.gate.packed_gate(cell, given)
    output = decode_attention_reference(given.query, given.exact, given.tiles, cell.shape.head_dim**-0.5).output
    assert gate.error(output) < 1e-5
    assert 1e-4 < gate.plain_error < 2e-2
    ratio = scripts.results.error_ratio
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    worse = output + 3 * gate.plain_error * output.std() * noise
    assert scripts.results.not_right(ratio(gate.error(worse), gate.plain_error))
    assert scripts.results.not_right(ratio(gate.error(output * torch.nan), gate.plain_error))
    assert not scripts.results.not_right(ratio(gate.error(output.bfloat16()), gate.plain_error))


def test_the_last_row_and_head_are_checked(scripts: Any) -> None:
    shapes = scripts.shapes
    for cell in (shapes.Cell(shapes.MIXTRAL, 32, 8192), shapes.Cell(shapes.QWEN3, 1, 8192)):
        units = list(scripts.inputs.checked_units(cell))
        assert units[0] == (0, 0)
        assert units[-1] == (cell.batch - 1, cell.shape.heads - 1)
        assert len(set(units)) == min(8, cell.units)


def baseline(scripts: Any, name: str, us: float | None, error: float | None = 1e-3, candidate: bool = True) -> Any:
    return scripts.baselines.Baseline(name, us, us, error, candidate)


def fake_results(scripts: Any) -> dict[str, Any]:
    """A win, a loss, a failure, and a mixture in two cells."""
    shapes, results = scripts.shapes, scripts.results
    rows, baselines = [], []
    for context, us in ((32768, 20.0), (8192, 50.0)):
        cell = shapes.Cell(shapes.MIXTRAL, 1, context)
        timed = [baseline(scripts, "sdpa flash gqa", 40.0), baseline(scripts, "triton split-k (64 tokens)", 60.0)]
        baselines += results.baseline_records(cell, timed)
        for variant in shapes.variants(cell, all_pairs=True):
            timing = scripts.timing.Timing(us, us + 1, graph=True)
            measured = results.Measured(timing, 20_000_000, 1e-3, 2e-3)
            if variant.name == "fp8/fp8":
                measured = results.Measured(None, 20_000_000, 1e-2, 2e-3, "error 1e-2 is too large")
            best = scripts.baselines.fastest(timed)
            rows.append(results.row(cell, variant, "cuda", measured, best, 4000.0, CONDITIONS))
    return {"conditions": CONDITIONS, "rows": rows, "baselines": baselines, "notes": ["a note"]}


def test_a_row_is_computed_from_what_was_measured(scripts: Any) -> None:
    rows = fake_results(scripts)["rows"]
    won = rows[0]
    assert (won["k_tier"], won["v_tier"], won["us"], won["us_again"]) == ("vq175", "vq175", 20.0, 21.0)
    assert (won["baseline"], won["baseline_us"], won["speedup"]) == ("sdpa flash gqa", 40.0, 2.0)
    assert won["copy_share"] == pytest.approx(20_000_000 / 20e-6 / 4000e9)
    assert won["error_ratio"] == pytest.approx(0.5)
    failed = next(row for row in rows if row["k_tier"] == "fp8")
    assert (failed["us"], failed["speedup"], failed["copy_share"]) == (None, None, None)
    assert failed["error_ratio"] == pytest.approx(5)
    assert failed["failed"]


def test_the_baseline_is_the_fastest_that_is_right(scripts: Any) -> None:
    wrong = baseline(scripts, "wrong", 1.0, error=0.5)
    other = baseline(scripts, "other", 2.0, candidate=False)
    broken = baseline(scripts, "broken", None, error=None)
    slow, fast = baseline(scripts, "slow", 9.0), baseline(scripts, "fast", 5.0)
    assert scripts.baselines.fastest([wrong, other, broken, slow, fast]) is fast
    assert scripts.baselines.fastest([wrong, other, broken]) is None


def test_a_mixture_is_held_against_the_pairs_that_it_consists_of(scripts: Any) -> None:
    shapes, results = scripts.shapes, scripts.results
    cell = shapes.Cell(shapes.MIXTRAL, 1, 32768)
    rows = [row for row in fake_results(scripts)["rows"] if not row["failed"]]
    for row in rows:
        if row["context"] == 32768 and row["k_tier"] == "vq175":
            row["us"] = 60.0
    assert results.weighted_mean_us(cell, shapes.MIX, "cuda", rows) == pytest.approx(0.25 * 60 + 0.75 * 20)
    assert results.weighted_mean_us(cell, shapes.MIX, "cuda", rows[1:]) is None
    assert results.weighted_mean_us(cell, shapes.MIX, "triton", rows) is None


def test_a_later_run_replaces_what_it_measured_again(scripts: Any) -> None:
    old, new = fake_results(scripts), fake_results(scripts)
    new["rows"] = [{**new["rows"][0], "us": 1.0}]
    new["baselines"] = new["baselines"][:1]
    old["notes"] += [scripts.results.skipped(f"Mixtral-8x7B, batch 1, 32768 tokens, {name}, cuda") for name in "ab"]
    old["notes"] += [scripts.results.skipped("Mixtral-8x7B, batch 1, 32768 tokens, vq2/vq2, cuda")]
    new["notes"] = ["a note", "another"]
    both = scripts.results.merged(old, new)
    assert len(both["rows"]) == len(old["rows"])
    assert both["rows"][0]["us"] == 1.0
    assert [line["context"] for line in both["baselines"]] == [8192, 8192, 32768]
    assert both["notes"] == ["a note", *old["notes"][1:3], "another"]


def test_the_report_shows_every_row(scripts: Any, tmp_path: Path) -> None:
    page, result_file = tmp_path / "README.md", tmp_path / "results.json"
    page.write_text("before\n<!-- report: decode_attention -->\nold\n<!-- end report -->\nafter\n", encoding="utf-8")
    found = fake_results(scripts)
    scripts.results.save(found, result_file)
    assert scripts.results.load(result_file) == json.loads(json.dumps(found))
    assert scripts.results.render_readme(page, result_file)
    assert not scripts.results.render_readme(page, result_file)
    shown = page.read_text(encoding="utf-8")
    assert shown.startswith("before\n<!-- report: decode_attention -->\n**Mixtral-8x7B**")
    assert shown.endswith("<!-- end report -->\nafter\n")
    assert shown.count("\n| 1, ") == len(found["rows"])
    assert "| 1, 32,768 | vq175/vq175 | cuda | 20.0 | 21.0 | 40.0 | 2.00 | 25% | 0.50 |" in shown
    assert "| 1, 8,192 | vq2/vq2 | cuda | 50.0 | 51.0 | 40.0 | 0.80 | 10% | 0.50 |" in shown
    assert "| 1, 8,192 | fp8/fp8 | cuda | failed | - | 40.0 | - | - | 5.00 |" in shown
    assert "slower than bf16 in 8 of the 16 rows" in shown
    assert "| Mixtral-8x7B, 1, 8,192 | **40** | 60 |" in shown
    assert "- a note" in shown


def test_pictures_are_drawn(scripts: Any, tmp_path: Path) -> None:
    found = fake_results(scripts)
    for draw, name in ((scripts.plot.plot_speedup, "speedup.png"), (scripts.plot.plot_roofline, "roofline.png")):
        draw(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        with pytest.raises(ValueError, match="nothing to draw"):
            draw({**found, "rows": []}, tmp_path / name)


def test_the_readme_shows_the_result_file(scripts: Any) -> None:
    results = scripts.results
    found = results.load(results.RESULT_FILE) if results.RESULT_FILE.exists() else None
    page = results.README.read_text(encoding="utf-8")
    assert "<!-- report: decode_attention -->" in page
    assert results.rendered(page, found) == page


def test_filters_and_deadlines(scripts: Any) -> None:
    limits, shapes = scripts.limits, scripts.shapes
    only = limits.Only(["shape=mixtral", "batch=1", "batch=8", "pair=vq2/vq2"])
    chosen = [cell for cell in shapes.grid() if only.cell(cell)]
    assert {(cell.shape.name, cell.batch) for cell in chosen} == {("Mixtral-8x7B", 1), ("Mixtral-8x7B", 8)}
    assert only.variant(shapes.TWO_BITS)
    assert not only.variant(shapes.MIX)
    assert only.backend("triton")
    with pytest.raises(ValueError, match="--only 'heads=4' is not possible"):
        limits.Only(["heads=4"])
    with pytest.raises(ValueError, match=r"--only 'pair=mix-2\.3' is not possible: a pair is one of"):
        limits.Only(["pair=mix-2.5", "pair=mix-2.3"])
    with pytest.raises(ValueError, match="--only 'backend=cpu' is not possible: a backend is one of"):
        limits.Only(["backend=cpu"])
    budget = limits.Budget(10.0)
    assert budget.allows(5.0, "short")
    assert not budget.allows(20.0, "long")
    assert budget.skipped == ["long"]
    assert limits.Budget(None).allows(1e9, "anything")


def test_what_runs_when_the_seconds_are_over_is_broken_off_and_remembered(scripts: Any) -> None:
    def swallows() -> str:
        with contextlib.suppress(scripts.limits.DeadlineError):
            time.sleep(30)
        return "made of half a measurement"

    def raises_its_own() -> None:
        try:
            time.sleep(30)
        finally:
            raise RuntimeError("the capture was invalidated")

    handler = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    for call in (lambda: time.sleep(30), swallows, raises_its_own):
        budget = scripts.limits.Budget(0.05)
        assert budget.within("a row", call) is None
        assert budget.skipped == ["a row"]
    assert time.monotonic() - start < 5
    for budget in (scripts.limits.Budget(10.0), scripts.limits.Budget(None)):
        assert budget.within("a row", lambda: 3) == 3
        with pytest.raises(RuntimeError, match="lost"):
            budget.within("a row", lambda: raise_(RuntimeError("the device was lost")))
        assert not budget.skipped
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def raise_(problem: Exception) -> None:
    raise problem


@pytest.mark.parametrize("slow", ["time_baselines", "measure"])
def test_a_run_ends_when_its_seconds_are_over_and_says_what_it_was_doing(
    slow: str, scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows = scripts.limits.Budget.allows
    monkeypatch.setattr(scripts.limits.Budget, "allows", lambda budget, _, what: allows(budget, 0.0, what))
    monkeypatch.setattr(scripts.run, "time_baselines", lambda *_: [])
    monkeypatch.setattr(scripts.run, "time_quantized_cache", lambda *_: baseline(scripts, "other", 1.0))
    monkeypatch.setattr(scripts.run, slow, lambda *_: time.sleep(60))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(scripts.run.main)
    out = tmp_path / "decode_attention.json"
    start = time.monotonic()
    words = [
        "--smoke",
        "--out",
        str(out),
        "--only",
        "shape=mixtral",
        "--only",
        "context=300",
        "--only",
        "pair=vq2/vq2",
    ]
    done = CliRunner().invoke(app, [*words, "--deadline", "2"])
    assert time.monotonic() - start < 20
    assert "making packed caches, compiling" in done.output or slow != "measure"
    found = scripts.results.load(out)
    assert found["rows"] == []
    cell = "Mixtral-8x7B, batch 1, 300 tokens"
    broken = cell if slow == "time_baselines" else f"{cell}, vq2/vq2, torch"
    assert scripts.results.skipped(broken) in found["notes"]


def test_baselines_of_the_file_are_not_timed_again(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.run, "time_baselines", lambda *_: pytest.fail("a baseline was timed"))
    cell = scripts.shapes.smoke_grid()[0]
    known = scripts.results.baseline_records(cell, [baseline(scripts, "sdpa flash gqa", 40.0)])
    out = tmp_path / "decode_attention.json"
    scripts.results.save({"conditions": CONDITIONS, "rows": [], "baselines": known, "notes": []}, out)
    only = scripts.limits.Only(["pair=vq2/vq2"])
    earlier = scripts.results.load(out)
    with torch.no_grad():
        run = scripts.run.Run(CPU, out, only, scripts.limits.Budget(None), earlier, smoke=True)
        run.cell(cell, reuse=True)
    assert [row["baseline_us"] for row in run.rows] == [40.0]


def test_a_cell_without_a_row_is_not_begun(scripts: Any) -> None:
    planned, shapes = scripts.run.planned, scripts.shapes
    only = scripts.limits.Only(["backend=cuda", "pair=mix-2.5"])
    with_rows = [cell for cell in shapes.grid() if planned(cell, only, smoke=False, on_gpu=True)]
    assert {cell.shape for cell in with_rows} == set(shapes.SHAPES)
    assert [backend for _, backend in planned(with_rows[0], only, smoke=False, on_gpu=True)] == ["cuda"]


def test_a_tuned_configuration_replaces_the_one_of_its_device_and_size(scripts: Any, tmp_path: Path) -> None:
    path, cell = tmp_path / "configs.json", small(scripts)
    for warps, device, mixed in ((4, "a", False), (8, "b", False), (2, "a", False), (12, "a", True)):
        scripts.tune.keep_config(path, device, cell, mixed, {"warps": warps, "blocks_per_sm": 1, "us": 12.5})
    known = json.loads(path.read_text(encoding="utf-8"))
    size = {"heads": 8, "tiles": 35, "blocks_per_sm": 1, "us": 12.5}
    assert known["a"] == [{**size, "mixed": False, "warps": 2}, {**size, "mixed": True, "warps": 12}]
    assert known["b"][0]["warps"] == 8


def test_the_winner_is_right_for_all_pairs_and_the_fastest_on_average(scripts: Any) -> None:
    times = {(4, 1): (9.0, 9.0), (8, 1): (5.0, 11.0), (16, 1): (1.0, None)}
    lines = [
        {"warps": warps, "blocks_per_sm": blocks, "us": us} for (warps, blocks), found in times.items() for us in found
    ]
    assert scripts.tune.winner(lines, pairs=2) == {"warps": 8, "blocks_per_sm": 1, "us": 8.0}
    assert scripts.tune.winner(lines[-1:], pairs=1) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--smoke", "--only", "colour=red"], "--only 'colour=red' is not possible"),
        (["--smoke", "--only", "shape=nosuch"], "--only leaves nothing of"),
        (["--only", "pair=foo"], "--only 'pair=foo' is not possible: a pair is one of ['vq175/vq175', 'vq2/vq2',"),
        (["--report", "--out", "nowhere.json"], "there is no result file 'nowhere.json'"),
        (["--plot", "--out", "nowhere.json"], "there is no result file 'nowhere.json'"),
    ],
)
def test_a_mistake_of_the_caller_is_told_from_a_wrong_kernel(
    words: list[str], message: str, scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", *words])
    monkeypatch.setattr(scripts.results, "render_readme", lambda **_: pytest.fail("the page was rendered"))
    with pytest.raises(SystemExit) as left:
        scripts.run.entry()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_the_smoke_run_measures_checks_and_draws(scripts: Any, tmp_path: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(scripts.run.main)
    out = tmp_path / "decode_attention.json"
    only = ["--only", "context=300", "--only", "pair=vq2/vq2", "--only", "backend=torch"]
    done = CliRunner().invoke(app, ["--smoke", "--out", str(out), *only])
    assert done.exit_code == 0, done.output
    found = scripts.results.load(out)
    row, latent, tokens = found["rows"]
    assert (latent["shape"], tokens["shape"]) == ("latent", "tokens")
    assert all(line["error_ratio"] < 1 for line in found["rows"])
    assert row["speedup"] == row["baseline_us"] / row["us"]
    assert {"shape", "batch", "context", "name", "us", "failed"} <= set(found["baselines"][0])
    assert (tmp_path / "decode_attention.png").exists()
    assert "| 1, 300 | vq2/vq2 | torch |" in (tmp_path / "README.md").read_text(encoding="utf-8")
