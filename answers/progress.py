"""Progress on standard error: a bar if that is a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..core.search.problem.meter import Progress as SearchProgress
from ..core.slow_work import called_if_slow
from .output import note, seconds_text

AFTER_S, EVERY_S = 4.0, 15.0
"""Seconds until the first line, and between lines."""


def note_if_slow(text: str) -> AbstractContextManager[None]:
    """Print a line if what follows takes longer than ``AFTER_S``."""
    return called_if_slow(AFTER_S, note, text)


@contextmanager
def search_progress() -> Iterator[SearchProgress]:
    """The progress of a search: a bar, removed at its end, or lines."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (TextColumn("planning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, budget: int, step_s: float) -> None:
            bar.update(task, total=budget, completed=done, description=_best(step_s))

        yield update


def _lines() -> SearchProgress:
    due = time.monotonic() + AFTER_S

    def update(done: int, budget: int, step_s: float) -> None:
        nonlocal due
        if time.monotonic() > due:
            due = time.monotonic() + EVERY_S
            note(f"planning: {done} of {budget} evaluations, {_best(step_s)}")

    return update


def _best(step_s: float) -> str:
    return "nothing fits yet" if step_s == float("inf") else f"best step {seconds_text(step_s)}"
