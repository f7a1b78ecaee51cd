"""Writing results down: what, when, on which machine."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from panpipe.runtimes.devices.machine import machine

__all__ = ["machine", "record"]


def record(path: str, title: str, where: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Append a table to a Markdown file."""
    lines = [
        f"## {title}", "", f"{datetime.date.today().isoformat()} · {where}", "",
        f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows), "",
    ]  # fmt: skip
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
