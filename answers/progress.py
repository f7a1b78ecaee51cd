"""Progress on standard error: a bar if that is a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..core.search.problem.meter import Progress as SearchProgress
from .output import note, seconds_text

EVERY_S = 4.0
"""Seconds until the first line, and between lines."""


@contextmanager
def noted(line: Callable[[], str]) -> Iterator[None]:
    """Print a line every ``EVERY_S`` while what follows runs, from another thread."""
    ended, start = Event(), time.monotonic()

    def lines() -> None:
        while not ended.wait(EVERY_S):
            note(f"{line()} ({time.monotonic() - start:.0f} s)")

    thread = Thread(target=lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def search_progress() -> Iterator[SearchProgress]:
    """The progress of a search: a bar, removed at its end, or lines."""
    if not sys.stderr.isatty():
        latest = "planning: building the first plans"

        def keep(done: int, budget: int, step_s: float) -> None:
            nonlocal latest
            latest = f"planning: {done} of {budget} evaluations, {best_text(step_s)}"

        with noted(lambda: latest):
            yield keep
        return
    columns = (TextColumn("planning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, budget: int, step_s: float) -> None:
            bar.update(task, total=budget, completed=done, description=best_text(step_s))

        yield update


def best_text(step_s: float) -> str:
    """The best step of a search, in words."""
    return "nothing fits yet" if step_s == float("inf") else f"best step {seconds_text(step_s)}"
