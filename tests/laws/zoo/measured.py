"""What checks of the zoo found, kept on disk as lines of JSON, so that a run can go on after another."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

Result = dict[str, Any]
HERE = Path(__file__).resolve().parents[3]


def commit() -> str:
    """The commit that is checked out; with ``-dirty`` where files differ from it, "" outside of a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=8"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class Measured:
    """Results on disk. A model's are those of the last run that trained it.

    Args:
        path: of the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._start, self._commit = path, time.time(), commit()
        self._by_model: dict[str, list[Result]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(line))
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, result: Result) -> None:
        """Keep a result of this run."""
        whole = {**result, "run": self._start, "commit": self._commit, "after_s": time.time() - self._start}
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(whole), file=file)
        self._keep(whole)

    def of(self, name: str) -> list[Result]:
        """The results of a model; empty where there are none."""
        return self._by_model.get(name, [])

    def seconds(self) -> float:
        """What the runs of which there are results took together."""
        ends: dict[float, float] = {}
        for result in (result for found in self._by_model.values() for result in found):
            ends[result["run"]] = max(ends.get(result["run"], 0.0), result["after_s"])
        return sum(ends.values())

    def _keep(self, result: Result) -> None:
        of_model = self._by_model.setdefault(result["model"], [])
        if of_model and of_model[0]["run"] != result["run"]:
            of_model.clear()
        of_model.append(result)
