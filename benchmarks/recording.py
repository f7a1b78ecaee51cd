"""Writing results down: what, when, on which machine."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch


def machine() -> str:
    """Processor, cores and versions, in one line."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor() or platform.machine(),
    )
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


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
