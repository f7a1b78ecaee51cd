"""Printing, used by all commands: tables, JSON, and notes on standard error."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.errors import RequestError
from ..core.files.write import write_text
from ..core.wording import signed_percent

LONGEST_NAME = 24
"""Characters of a cell of a table's first column that is not wrapped."""


def print_json(value: object) -> None:
    """Print plain data as JSON on standard output. Infinity (a link without a limit), which JSON lacks, is null."""
    try:
        text = json.dumps(value, indent=1, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=1, allow_nan=False)
    print(text)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def note(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr)


def write_noted(path: Path | None, text: Callable[[], str]) -> None:
    """Write the file of an option, and print its name on standard error; without the option nothing."""
    if path is not None:
        write_text(path, text())
        note(f"written to {path}")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, texts: Collection[str] = ()
) -> None:
    """Print a table on standard output.

    Args:
        texts: columns of text, in addition to the first; the other columns are right-aligned.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    cells = [[cell if isinstance(cell, str) else readable(cell) for cell in row] for row in rows]
    names = all(len(row[0]) <= LONGEST_NAME for row in cells)
    console = Console(highlight=False)
    parts = [[word for cell in column for word in cell.split()] for column in zip(columns, *cells, strict=True)]
    fit = sum(max(map(len, words), default=0) + 2 for words in parts) <= console.width
    for position, column in enumerate(columns):
        left = position == 0 or column in texts
        # Other columns wrap before the names of the rows do, and those of several words before those of one.
        one_word = fit and len(parts[position]) <= 1 + len(cells)
        whole = (position == 0 and names) or one_word
        table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=whole)
    for row in cells:
        table.add_row(*map(Text, row))
    print(f"\n{textwrap.fill(title, console.width)}" if title else "")
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_records(
    title: str,
    records: Iterable[Any],
    columns: Mapping[str, str | Callable[[Any], object]],
    texts: Collection[str] = (),
) -> None:
    """Print a table with a row for each record; nothing if there are none.

    Args:
        columns: heading → what it has of a record: a function, or a path of attributes, perhaps with one of `UNITS`, as
            in ``duration.predicted s``. None is a dash.
        texts: see `print_table`.
    """
    rows = [[_cell(record, column) for column in columns.values()] for record in records]
    if rows:
        print_table(title, tuple(columns), rows, texts=texts)


def _cell(record: Any, column: str | Callable[[Any], object]) -> object:
    if not isinstance(column, str):
        return column(record)
    path, _, unit = column.partition(" ")
    for name in path.split("."):
        record = None if record is None else getattr(record, name)
    return "–" if record is None else UNITS[unit](record) if unit else record


def wide() -> bool:
    """Whether the terminal is wider than 100 characters."""
    return Console().width > 100


def readable(value: object) -> str:
    """A float with four significant digits; ``str`` of anything else."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bytes_text(size: float) -> str:
    """A size with a unit, decimal: ``1.50 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def seconds_text(time_s: float) -> str:
    """A time with a unit: ``12.3 ms``; less than a picosecond is a rounding error, and 0."""
    if abs(time_s) >= 1000:
        return f"{time_s:,.0f} s"
    if abs(time_s) >= 1 or abs(time_s) < 1e-12:
        return f"{time_s if abs(time_s) >= 1 else 0:.3g} s"
    return f"{time_s * 1e3:.3g} ms" if abs(time_s) >= 1e-3 else f"{time_s * 1e6:.3g} µs"


def rate_text(bytes_per_s: float) -> str:
    """A rate of a link in each direction: ``23.5 GB/s``; without a limit a dash."""
    return f"{bytes_per_s / 1e9:.4g} GB/s" if isfinite(bytes_per_s) else "–"


def share_text(part: float, whole: float) -> str:
    """A share in percent: ``12.3%``."""
    return f"{part / whole:.1%}" if whole else "–"


UNITS: Mapping[str, Callable[[float], str]] = {
    "s": seconds_text,
    "B": bytes_text,
    "B/s": lambda rate: f"{bytes_text(rate)}/s" if isfinite(rate) else "–",
    "GB/s": rate_text,
    "%": "{:.1%}".format,
    "±%": signed_percent,
}
"""How a value is written, by its unit."""


def check_writable(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed; None is ignored.

    Raises:
        RequestError: a path is a folder, or its folder does not exist or may not be written.
    """
    for path in paths:
        if path is None:
            continue
        reason = None
        if path.is_dir():
            reason = "it is a folder; give the path of a file in it"
        elif not path.parent.is_dir():
            reason = f"there is no folder '{path.parent}'; create it, or give a path in a folder that exists"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "permission denied; give a path that you may write"
        if reason is not None:
            raise RequestError(f"cannot write '{path}': {reason}")
