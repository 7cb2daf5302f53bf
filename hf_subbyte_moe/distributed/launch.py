"""Under torchrun and ``accelerate launch``: the first rank speaks, and a failure is heard from any.

A launcher ends all processes when one fails; what is left to do is that the others keep quiet until then, and that the
failing one says why.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed


def rank() -> int:
    """This process's number among those that a launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """How many processes a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_device() -> torch.device:
    """This process's GPU, which becomes the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def grouped(device: torch.device) -> Iterator[None]:
    """All ranks are one process group; alone, there is none.

    An exception leaves the group as it is: to leave it, a rank would wait for those that wait for it.
    """
    if ranks() == 1:
        yield
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def one_voice() -> Iterator[None]:
    """On every rank but the first, print nothing and show no progress bar; an exception leaves as it is."""
    if rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield
