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
Result = dict[str, Any]


class Crew:
    """Worker processes of one backend; where they die, a new crew goes on behind the model that they died of.

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
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._processes = [self._process(shared, rank) for rank in range(RANKS if self.backend == "gloo" else 1)]

    def _process(self, shared: dict[str, str], rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(WORKER), self.backend, f"{self._file}.{rank}", *self._left]
        with Path(f"{self._file}.{rank}.err").open("w", encoding="utf-8") as said:
            return subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=said)

    def done(self) -> bool:
        """Whether all models were tried; starts another crew where this one died."""
        ended = [process.poll() for process in self._processes]
        if all(status == 0 for status in ended):
            self._collect()
            return True
        if not any(status not in (None, 0) for status in ended):
            return False
        self.stop()
        found = self._collect()
        done = len(dict.fromkeys(result["model"] for result in found))
        # The model under work is the last with results, or the one behind it where that has all of its own.
        whole = sum(result["model"] == found[-1]["model"] for result in found) == 4 if found else True
        culprit = self._left[done - (not whole)]
        said = " ".join(Path(f"{self._file}.0.err").read_text(encoding="utf-8")[-300:].split())
        self.results.append({"model": culprit, "backend": self.backend, "right": False, "problem": f"died: {said}"})
        self._left = self._left[self._left.index(culprit) + 1 :]
        if not self._left:
            return True
        self._start()
        return False

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _collect(self) -> list[Result]:
        path = Path(f"{self._file}.0")
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        self.results += found
        return found


def run_zoo(
    names: Sequence[str], folder: Path, limit_s: float, progress: Callable[[int], None] = lambda _: None
) -> list[Result]:
    """Train models by threads and over gloo, both at the same time.

    Args:
        names: of models.
        folder: for results and what workers say.
        limit_s: seconds after which workers are stopped.
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
            progress(sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.0")))
        if open_crews:
            raise TimeoutError(f"{', '.join(crew.backend for crew in open_crews)}: not done after {limit_s:.0f} s")
    finally:
        for crew in crews:
            crew.stop()
    return [result for crew in crews for result in crew.results]
