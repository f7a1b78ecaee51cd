"""The message that is printed before functions of panpipe are compiled to machine code, once after an installation.

This module does not import numba, which takes a second to load; ``numba_cache`` calls :func:`announce`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMPILING = "compiling the search, once after an editable installation: about 50 s of processor time"

Report = Callable[[str], object]
_waiting: list[Report] = []


@contextmanager
def compile_notice(report: Report) -> Iterator[None]:
    """Call ``report`` with a line before the first function that is compiled within this context."""
    _waiting.append(report)
    try:
        yield
    finally:
        if report in _waiting:
            _waiting.remove(report)


def announce() -> None:
    """Call every waiting report once; equal ones are one."""
    waiting = dict.fromkeys(_waiting)
    _waiting.clear()
    for report in waiting:
        report(COMPILING)
