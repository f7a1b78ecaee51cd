"""Runs models of the zoo in worker processes, each of which trains many of them: by threads, and on two ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
LAUNCHERS = {"threads": (), "gloo": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")}
HANGS_AFTER_S = 400
"""Seconds without a result after which a worker counts as one that hangs."""
Result = dict[str, Any]


class Worker:
    """A process that trains models. Where it dies or hangs, another continues after the model that it was at.

    Args:
        names: of models, in order.
        backend: ``"threads"``, or ``"gloo"`` for ranks.
        folder: where the worker writes.
        report: called with each result.
    """

    def __init__(self, names: Sequence[str], backend: str, folder: Path, report: Callable[[Result], None]) -> None:
        self._left, self._backend, self._folder, self._report = list(names), backend, folder, report
        self._processes = 0
        self._start()

    def _start(self) -> None:
        self._processes += 1
        self._file = self._folder / f"{id(self)}-{self._processes}"
        self._lines, self._progress, self._model = dict[str, int](), time.monotonic(), self._left[0]
        with Path(f"{self._file}.err").open("w", encoding="utf-8") as said:
            self._process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[self._backend], str(WORKER), str(self._file), *self._left],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    def done(self) -> bool:
        """Report new results; whether all models were tried. Starts another process where this one died or hangs."""
        status = self._process.poll()
        self._collect()
        if status == 0:
            return True
        hangs = time.monotonic() - self._progress > HANGS_AFTER_S
        if not hangs and status is None:
            return False
        self.stop()
        self._collect()
        self._add(self._model, f"hangs for {HANGS_AFTER_S} s" if hangs else f"died: {self._said()}")
        self._left = self._left[self._left.index(self._model) + 1 :]
        if not self._left:
            return True
        self._start()
        return False

    def stop(self) -> None:
        """End the process, and those that it forked: a launcher that is asked to end its ranks, which are in groups of
        their own, does so within 30 s."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _add(self, name: str, problem: str) -> None:
        self._report({"model": name, "backend": self._backend, "outcome": "crashed", "problem": problem})

    def _said(self) -> str:
        """The end of what it wrote to standard error."""
        return " ".join(Path(f"{self._file}.err").read_text(encoding="utf-8")[-300:].split())

    def _collect(self) -> None:
        """Report what was written since the last call."""
        for suffix in ("", "0", "1"):  # of threads, and of each rank
            path = Path(f"{self._file}{suffix}")
            whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
            for line in map(json.loads, whole.splitlines()[self._lines.get(suffix, 0) :]):
                self._lines[suffix], self._progress = self._lines.get(suffix, 0) + 1, time.monotonic()
                if "begins" in line:
                    self._model = line["begins"]
                else:
                    self._report(line)


def run_zoo(
    names: Sequence[str],
    folder: Path,
    limit_s: float,
    report: Callable[[Result], None] = lambda _: None,
    workers: int = 2,
) -> list[Result]:
    """Train models by threads and on ranks.

    Args:
        names: of models.
        folder: for what workers write.
        limit_s: seconds after which workers are stopped; models that are left have no results.
        report: called with each result as soon as it is there.
        workers: how many processes share the models, half of them by threads; those of ranks have two.

    Returns:
        What every check found.
    """
    found: list[Result] = []

    def collect(result: Result) -> None:
        found.append(result)
        report(result)

    parts = [names[i :: max(workers // 2, 1)] for i in range(max(workers // 2, 1))]
    working = [Worker(part, kind, folder, collect) for part in parts if part for kind in ("threads", "gloo")]
    end = time.monotonic() + limit_s
    try:
        busy = list(working)
        while busy and time.monotonic() < end:
            time.sleep(0.5)
            busy = [worker for worker in busy if not worker.done()]
    finally:
        for worker in working:
            worker.stop()
    return found
