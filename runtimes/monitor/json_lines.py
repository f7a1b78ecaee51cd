"""A monitor that writes a JSON document for each step: one line of a file."""

import json
import math
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import asdict

from .records import StepReport


class JsonLines:
    """Appends a line to a file for each step: the fields of `StepReport`, and its sums over devices.

    A number that JSON does not have is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, which Python's
    ``float`` reads. Lines are written to the file at once. The file is opened at the first step, so that every rank may
    create the monitor and only the rank that is called writes.

    Args:
        path: of the file; its folder is created.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: FileIO | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a line."""
        sums = {name: getattr(report, name) for name in ("bubble", "messages", "message_bytes", "memory_peak_bytes")}
        line = json.dumps(_plain(asdict(report) | sums), allow_nan=False) + "\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = _end_of_part(self._path) + line
            self._file = self._path.open("ab", buffering=0)
        try:
            left = memoryview(line.encode())
            while left:
                left = left[self._file.write(left) :]
        except OSError:  # the file may end with a part of the line
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a later step opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_of_part(path: Path) -> str:
    """A line break if a file ends with a part of a line: the disk was full, or a process was killed."""
    if not path.is_file() or not path.stat().st_size:
        return ""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return "" if file.read() == b"\n" else "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
