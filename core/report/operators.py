"""A short list of a stage's operators: the modules they belong to."""

import re
from collections.abc import Sequence
from itertools import groupby

MOST = 8
"""Most lines for one stage."""


def condensed(names: Sequence[str]) -> list[tuple[str, int]]:
    """Neighbouring operators joined by module, with their counts: the deepest modules that give at most ``MOST`` lines.

    Modules that differ only in one number, such as ``h.3`` and ``h.4``, become one line ``h.3–4``.
    """
    paths = [re.split(r"[./]", name.lstrip("/")) for name in names]
    lines: list[tuple[str, int]] = []
    for depth in range(max((len(path) for path in paths), default=0), 0, -1):
        groups = [(".".join(key), len(list(group))) for key, group in groupby(path[:depth] for path in paths)]
        lines = _runs(groups)
        if len(lines) <= MOST:
            return lines
    rest = lines[MOST - 1 :]
    return [*lines[: MOST - 1], (f"… {len(rest)} more", sum(count for _, count in rest))] if rest else lines


def _runs(groups: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join neighbours whose names end in consecutive numbers."""
    lines: list[tuple[str, int, int, int]] = []
    for name, count in groups:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        stem, number = (match[1], int(match[2])) if match else (name, -1)
        if match and lines and lines[-1][0] == stem and lines[-1][2] == number - 1:
            lines[-1] = (stem, lines[-1][1], number, lines[-1][3] + count)
        else:
            lines.append((stem, number, number, count))
    return [
        (stem if first < 0 else f"{stem}{first}" if first == last else f"{stem}{first}–{last}", count)
        for stem, first, last, count in lines
    ]
