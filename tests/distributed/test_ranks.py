"""Real processes under torchrun, gloo on the CPU: what several ranks compute is what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ranks as workers
from support.models import tiny_model


WORKERS = Path(workers.__file__)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
# several processes on a CPU: without --multi_gpu accelerate wants MPI for them
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes")


def launched(ranks: int, *arguments: str, by: tuple[str, ...] = TORCHRUN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *by, str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("mixtral", num_key_value_heads=4, num_attention_heads=8).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return workers.heads(folder)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, Any]]:
    ranks: int = request.param
    done = launched(ranks, str(WORKERS), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return ranks, json.loads((folder / f"{ranks}.json").read_text(encoding="utf-8"))


def test_tensor_parallel_packs_as_one_process_does(alone: dict[str, Any], shared: tuple[int, dict[str, Any]]) -> None:
    """Tokens and every head's tier are those of one process; every rank holds its own heads; the budget holds."""
    ranks, found = shared[0], shared[1]["heads"]
    for policy in workers.POLICIES:
        whole, parts = alone[policy], found[policy]
        assert parts["tokens"] == whole["tokens"]
        assert set(parts["heads"]) == {4 // ranks}
        assert len(parts["choices"]) == len(whole["choices"]) > 0
        for ours, theirs in zip(parts["choices"], whole["choices"], strict=True):
            key = ("layer", "row", "head", "side", "first_tile", "tiles", "tier")
            assert [ours[name] for name in key] == [theirs[name] for name in key]
            assert (ours["error"] is None) == (theirs["error"] is None)
            if ours["error"] is not None:
                assert ours["error"] == pytest.approx(theirs["error"], rel=1e-3)
        assert parts["size"]["bits"] == pytest.approx(whole["size"]["bits"])
        assert parts["size"]["bits"] <= workers.CACHE["bits"] + 1e-9
        assert parts["size"]["plain_bytes"] == whole["size"]["plain_bytes"]
    exact, half = (torch.tensor(alone[name]) for name in ("logits", "bf16 logits"))
    assert torch.allclose(torch.tensor(found["logits"]), exact, atol=1e-5)
    error = (torch.tensor(found["bf16 logits"]) - exact).abs().max()
    assert error <= 2 * (half - exact).abs().max()


def test_experts_lie_where_their_clusters_do(shared: tuple[int, dict[str, Any]]) -> None:
    """Logits are one process's; what crossed is what the trace says; soft routing lowers it, and so says the trace."""
    if shared[0] != 2:
        assert "experts" not in shared[1]
        return
    found = shared[1]["experts"]
    for case in found.values():
        assert case["difference"] < 1e-4
        assert case["bytes"] == case["predicted"]
        assert 0 < case["bytes"] < case["all_reduce"]
    assert found["soft"]["bytes"] < 0.95 * found["clustered"]["bytes"]
    assert found["back"] == found["by index"]
    assert found["clustered"]["bytes"] != found["by index"]["bytes"]


BENCH = ("-m", "hf_subbyte_moe.cli", "bench", "latency", "--model", "toy", "--layers", "2", "--tokens", "16")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_ranks_time_one_model_and_one_tells(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Rows are of both ranks, caches of one rank's heads; the table is printed once."""
    file = tmp_path / "rows.json"
    systems = ("stock default", "cache", "+ router")
    names = [word for name in systems for word in ("--system", name)]
    done = launched(2, *BENCH, "--context", "64", "--fill", *names, "--json", str(file), by=launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["system"], row["gpus"], row["layers"], row["device"]) for row in rows] == [
        (name, 2, 2, "CPU") for name in systems
    ]
    plain = 2 * 2 * (64 + 15) * 16 * 2  # layers, sides, tokens, one head of two, bytes
    assert rows[0]["cache_gb"] == pytest.approx(plain / 1e9)
    for row in rows:
        assert all(0 < row[key] < float("inf") for key in ("ms_generate", "ms_mean", "ms_step"))
        assert 0 < row["share_of_roofline"] < 1
    assert done.stdout.count("GPUs") == 1  # the table's header
    assert " ".join(done.stdout.split()).count("'gpus': 2") == len(systems)


@pytest.mark.slow
def test_a_system_that_ranks_cannot_share_ends_all_with_the_reason() -> None:
    done = launched(2, *BENCH, "--system", "+ graph")
    assert done.returncode != 0
    assert "--system '+ graph' is not possible here: the steps of a model" in done.stderr
    assert "ms a token" not in done.stdout


def test_one_rank_speaks_and_a_failing_one_ends_all_with_its_message(tmp_path: Path) -> None:
    """Rank 1 fails while rank 0 waits for it; rank 1's other output is not shown."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from hf_subbyte_moe.distributed.launch import one_voice\n"
        "with one_voice():\n"
        "    print('said by', os.environ['RANK'], flush=True)\n"
        "    print('bar of', os.environ['RANK'], file=sys.stderr, flush=True)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        time.sleep(2)\n"
        "        raise ValueError('rank 1 has no model')\n"
        "    time.sleep(200)\n"
    )
    done = launched(2, str(script))
    assert done.returncode != 0
    assert "rank 1 has no model" in done.stderr
    assert "said by 0" in done.stdout
    assert "said by 1" not in done.stdout
    assert "bar of 0" in done.stderr
    assert "bar of 1" not in done.stderr
