"""Runs models of the zoo in worker processes that live for many of them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
RANKS = 3
HANGS_AFTER_S = 400
"""Seconds without a result after which a crew counts as one that hangs."""
Result = dict[str, Any]


class Crew:
    """Worker processes. Where they die or hang, another crew continues after the model that they were at.

    Args:
        names: of models, in order.
        folder: where workers write.
        report: called with each result.
    """

    def __init__(self, names: Sequence[str], folder: Path, report: Callable[[Result], None]) -> None:
        self._left, self._folder, self._report = list(names), folder, report
        self._crews = 0
        self._start()

    def _start(self) -> None:
        self._crews += 1
        self._file = self._folder / f"{id(self)}-{self._crews}"
        self._lines, self._progress, self._model = 0, time.monotonic(), self._left[0]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._processes = [self._process(shared, rank) for rank in range(RANKS)]

    def _process(self, shared: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(WORKER), f"{self._file}.{rank}", *self._left]
        with Path(f"{self._file}.{rank}.err").open("w", encoding="utf-8") as said:
            return subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=said)

    def done(self) -> bool:
        """Report new results; whether all models were tried. Starts another crew where this one died or hangs."""
        ended = [process.poll() for process in self._processes]
        self._collect()
        if all(status == 0 for status in ended):
            return True
        hangs = time.monotonic() - self._progress > HANGS_AFTER_S
        if not hangs and not any(status not in (None, 0) for status in ended):
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
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _add(self, name: str, problem: str) -> None:
        self._report({"model": name, "backend": "both", "outcome": "crashed", "problem": problem})

    def _said(self) -> str:
        """The end of what the rank with the most to say wrote to standard error."""
        said = [Path(f"{self._file}.{rank}.err").read_text(encoding="utf-8") for rank in range(len(self._processes))]
        return " ".join(max(said, key=len)[-300:].split())

    def _collect(self) -> None:
        """Report what the first rank has written since the last call."""
        path = Path(f"{self._file}.0")
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        for line in map(json.loads, whole.splitlines()[self._lines :]):
            self._lines, self._progress = self._lines + 1, time.monotonic()
            if "begins" in line:
                self._model = line["begins"]
            else:
                self._report(line)


def run_zoo(
    names: Sequence[str], folder: Path, limit_s: float, report: Callable[[Result], None] = lambda _: None,
    crews: int = 2,
) -> list[Result]:  # fmt: skip
    """Train models by threads and over gloo.

    Args:
        names: of models.
        folder: for what workers write.
        limit_s: seconds after which workers are stopped; models that are left have no results.
        report: called with each result as soon as it is there.
        crews: how many groups of workers share the models.

    Returns:
        What every check found.
    """
    found: list[Result] = []

    def collect(result: Result) -> None:
        found.append(result)
        report(result)

    working = [Crew(part, folder, collect) for part in (names[i::crews] for i in range(crews)) if part]
    end = time.monotonic() + limit_s
    try:
        open_crews = list(working)
        while open_crews and time.monotonic() < end:
            time.sleep(0.5)
            open_crews = [crew for crew in open_crews if not crew.done()]
    finally:
        for crew in working:
            crew.stop()
    return found
