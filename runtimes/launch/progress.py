"""Progress of planning: a progress bar on a terminal, one line for each phase elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ...core.errors import RequestError
from ...core.slow_work import called_if_slow
from ..watch.activity import HERE

Progress = Callable[[str, int, int], None]
"""Called with the phase, and with the numbers of done and of all parts; both are 0 if the phase has no parts."""


class Report(Protocol):
    """The function that planning calls at the start of a phase or of a part of one."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...


def silent(phase: str, done: int = 0, total: int = 0) -> None:
    """Report nothing: for all ranks but the first, and for ``progress=False``."""


@contextmanager
def show_progress(progress: bool | Progress, first: bool) -> Iterator[Report]:
    """Show phases while planning, on standard error.

    Args:
        progress: True shows them, False does not; a function is called with them.

    Raises:
        RequestError: progress is none of these.
    """
    if first and progress is True and sys.stderr.isatty():
        with _line() as report:
            yield _noted(report)
    else:
        yield progress_lines(progress, first)


def progress_lines(progress: bool | Progress, first: bool) -> Report:
    """The same without a progress bar, also for what comes after planning."""
    if not isinstance(progress, bool) and not callable(progress):
        raise RequestError(f"progress is {progress!r}: give True, False, or a function of phase, done and total")
    if not first or progress is False:
        return _noted(silent)
    if progress is True:
        return _noted(_lines())
    return _noted(lambda phase, done=0, total=0: progress(phase, done, total))


NOTICED_S = 2.0
"""Seconds of a capture after planning from which on it is reported."""


def reported_if_slow(report: Report, phase: str) -> AbstractContextManager[None]:
    """Report a phase while it runs, from another thread, if it takes longer than `NOTICED_S`."""
    return called_if_slow(NOTICED_S, report, phase)


def _noted(report: Report) -> Report:
    """A report whose phases are also the activity of this process."""

    def both(phase: str, done: int = 0, total: int = 0) -> None:
        HERE.doing(f"'{phase}', {min(done + 1, total)} of {total}" if total else f"'{phase}'")
        report(phase, done, total)

    return both


@contextmanager
def _line() -> Iterator[Report]:
    """A progress bar, removed at the end of planning: phase, part, elapsed and remaining time."""
    from rich.console import Console  # for terminals alone
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("panpipe: {task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[part]}"),
        TimeElapsedColumn(), TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None, part="")
        last = 0

        def report(phase: str, done: int = 0, total: int = 0) -> None:
            nonlocal last
            if not total or total != last:  # phases with one total share a bar, for its estimate of the remaining time
                bar.reset(task, total=total or None)
            last = total
            part = f"{min(done + 1, total)} of {total}" if total else ""
            bar.update(task, description=phase, completed=done, total=total or None, part=part)

        yield report


def _lines() -> Report:
    """A line for each phase, with the seconds since the first."""
    start, last = time.monotonic(), ""

    def report(phase: str, done: int = 0, total: int = 0) -> None:
        nonlocal last
        if phase != last:
            print(f"panpipe: {time.monotonic() - start:5.1f} s  {phase}", file=sys.stderr, flush=True)
            last = phase

    return report
