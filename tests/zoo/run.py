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
    """Worker processes of one backend. Where they die or hang, another crew continues after the model they were at.

    Args:
        backend: ``"threads"`` or ``"gloo"``.
        names: of models, in order.
        folder: where results go.
    """

    def __init__(self, backend: str, names: Sequence[str], folder: Path) -> None:
        self.backend, self._left, self._folder = backend, list(names), folder
        self._crews = 0
        self.results: list[Result] = []
        self._start()

    def _start(self) -> None:
        self._crews += 1
        self._file = self._folder / f"{self.backend}-{id(self)}-{self._crews}"
        self._lines, self._progress = 0, time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._processes = [self._process(shared, rank) for rank in range(RANKS if self.backend == "gloo" else 1)]

    def _process(self, shared: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(WORKER), self.backend, f"{self._file}.{rank}", *self._left]
        with Path(f"{self._file}.{rank}.err").open("w", encoding="utf-8") as said:
            return subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=said)

    def done(self) -> bool:
        """Whether all models were tried; starts another crew where this one died or hangs."""
        ended = [process.poll() for process in self._processes]
        if all(status == 0 for status in ended):
            self._collect()
            return True
        lines = self._read()
        if len(lines) > self._lines:
            self._lines, self._progress = len(lines), time.monotonic()
        hangs = time.monotonic() - self._progress > HANGS_AFTER_S
        if not hangs and not any(status not in (None, 0) for status in ended):
            return False
        self.stop()
        self._collect()
        begun = [line["begins"] for line in self._read() if "begins" in line]
        culprit = begun[-1] if begun else self._left[0]
        self._add(culprit, f"hangs for {HANGS_AFTER_S} s" if hangs else f"died: {self._said()}")
        self._left = self._left[self._left.index(culprit) + 1 :]
        if not self._left:
            return True
        self._start()
        return False

    def give_up(self) -> None:
        """End the processes; models that were not tried have that for a result."""
        self.stop()
        self._collect()
        tried = {result["model"] for result in self.results}
        for name in self._left:
            if name not in tried:
                self._add(name, "not run: the time was up")

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _add(self, name: str, problem: str) -> None:
        self.results.append({"model": name, "backend": self.backend, "outcome": "crashed", "problem": problem})

    def _said(self) -> str:
        """The end of what the first rank that said something wrote to standard error."""
        said = [Path(f"{self._file}.{rank}.err").read_text(encoding="utf-8") for rank in range(len(self._processes))]
        return " ".join(max(said, key=len)[-300:].split())

    def _read(self) -> list[Result]:
        path = Path(f"{self._file}.0")
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def _collect(self) -> None:
        self.results += [line for line in self._read() if "model" in line]


def run_zoo(
    names: Sequence[str], folder: Path, limit_s: float, progress: Callable[[int], None] = lambda _: None
) -> list[Result]:
    """Train models by threads and over gloo, both at the same time.

    Args:
        names: of models.
        folder: for results and what workers say.
        limit_s: seconds after which workers are stopped; models that are left count as crashed.
        progress: told how many checks are done.

    Returns:
        What every check found.
    """
    parts = ("gloo", names), ("threads", names[::2]), ("threads", names[1::2])
    crews = [Crew(backend, part, folder) for backend, part in parts if part]
    end = time.monotonic() + limit_s
    try:
        open_crews = list(crews)
        while open_crews and time.monotonic() < end:
            time.sleep(0.5)
            open_crews = [crew for crew in open_crews if not crew.done()]
            progress(sum(path.read_text(encoding="utf-8").count('"model"') for path in folder.glob("*.0")))
        for crew in open_crews:
            crew.give_up()
    finally:
        for crew in crews:
            crew.stop()
    return [result for crew in crews for result in crew.results]
