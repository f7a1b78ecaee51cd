"""A progress bar on standard error, if that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..core.search.problem.meter import Progress as SearchProgress
from .output import seconds_text


@contextmanager
def search_progress() -> Iterator[SearchProgress | None]:
    """A bar for a search, removed at its end; None if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("planning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, budget: int, step_s: float) -> None:
            best = "nothing fits yet" if step_s == float("inf") else f"best step {seconds_text(step_s)}"
            bar.update(task, total=budget, completed=done, description=best)

        yield update
