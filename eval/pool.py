"""Runs commands side by side, several of which share a device, and gathers what they have written so far.

Small models leave a GPU idle while the host prepares their many small kernels, so several processes measure faster
than one. Each writes a result file of its own; its rows join the whole whenever it changes, so that a run that is cut
off keeps them.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm


_LOOK_S = 0.5
_STOP_S = 10.0  # that a process gets to end by itself


@dataclass
class Job:
    """A command that is run by this Python.

    Attributes:
        name: for logs.
        words: of the command, behind ``python``.
        out: the result file that it writes.
    """

    name: str
    words: Sequence[str]
    out: Path
    _process: Any = field(default=None, repr=False)
    _seen: int = field(default=0, repr=False)

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.out.with_suffix(".log")

    def start(self, environment: dict[str, str]) -> None:
        """Begin."""
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.words], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def changed(self) -> bool:
        """Whether its result file was written since somebody asked."""
        now = self.out.stat().st_mtime_ns if self.out.exists() else 0
        self._seen, before = now, self._seen
        return now != before

    def ended(self) -> int | None:
        """The exit code, once it is over."""
        code: int | None = self._process.poll()
        return code

    def stop(self) -> None:
        """End it, if it is not over."""
        if self.ended() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def last_line(self) -> str:
        """The end of what it printed."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it printed nothing")


def run_jobs(jobs: Sequence[Job], at_once: int, gather: Callable[[Path], None]) -> list[str]:
    """Run all jobs.

    Args:
        jobs: the first ones begin first.
        at_once: so many run at a time.
        gather: is given each result file when it was written.

    Returns:
        What went wrong, job by job.
    """
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
    waiting, running, failed = list(jobs), [], []
    with tqdm(total=len(jobs), desc="jobs", unit="job") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(environment)
                time.sleep(_LOOK_S)
                for job in list(running):
                    code = job.ended()  # before its rows: it may write the last ones right now
                    if job.changed():
                        gather(job.out)
                    if code is None:
                        continue
                    running.remove(job)
                    bar.update()
                    if code:
                        failed.append(f"{job.name} ended with {code}: {job.last_line()} ({job.log})")
        finally:
            for job in running:
                job.stop()
                if job.changed():
                    gather(job.out)
    return failed


def job_folder() -> Path:
    """A new folder for what jobs read and write."""
    return Path(tempfile.mkdtemp(prefix="hf-subbyte-moe-jobs-"))
