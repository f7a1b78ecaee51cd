"""Printing, shared by the commands: tables for people, JSON for programs, notes on standard error."""

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_json(value: object) -> None:
    """Print plain data as JSON on standard output."""
    print(json.dumps(value, indent=1))


def note(text: str) -> None:
    """Tell people something without touching standard output."""
    print(text, file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output; its first column is text, the others numbers or short words."""
    table = Table(title=title or None, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*[cell if isinstance(cell, str) else readable(cell) for cell in row])
    Console().print(table)


def readable(value: object) -> str:
    """A number with four significant digits, anything else as it is written."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bytes_text(size: float) -> str:
    """A size with a unit, decimal: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def seconds_text(time_s: float) -> str:
    """A time with a unit: ``12.3 ms``."""
    if abs(time_s) >= 1:
        return f"{time_s:.3g} s"
    return f"{time_s * 1e3:.3g} ms" if abs(time_s) >= 1e-3 else f"{time_s * 1e6:.3g} µs"
