"""Calls the user's monitors, which are functions of the numbers of a step, on one rank."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...core.errors import RequestError, in_a_line
from ...core.logs import LOGGER
from .records import StepReport

Monitor = Callable[[StepReport], Any]
"""Called after each step; its ``close()``, if it has one, is called when the pipeline is closed."""


def monitors_of(given: Monitor | Sequence[Monitor] | None) -> tuple[Monitor, ...]:
    """The monitors of ``monitor=``: one function, or several.

    Raises:
        RequestError: it is neither.
    """
    found = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in found:
        if not callable(each):
            raise RequestError(
                f"monitor is {each!r}: give a function of a panpipe.monitors.StepReport, such as "
                "panpipe.monitors.JsonLines('a.json'), or a list of them"
            )
    return found


class Monitors:
    """Calls the user's monitors.

    A monitor that raises an exception does not change training. The exception is logged once, and again when it is
    another one; the monitor is called in later steps.

    Args:
        all: the monitors.
    """

    def __init__(self, all: Sequence[Monitor]) -> None:
        self._all = all
        self._logged: dict[int, str] = {}

    def call(self, report: StepReport) -> None:
        """Call all monitors with a report."""
        for place, monitor in enumerate(self._all):
            self._guarded(place, f"monitor {_name(monitor)} failed in step {report.step}", partial(monitor, report))

    def close(self) -> None:
        """Close the monitors that have ``close()``."""
        for place, monitor in enumerate(self._all):
            close = getattr(monitor, "close", None)
            if callable(close):
                self._guarded(place, f"monitor {_name(monitor)} failed when it was closed", close)

    def _guarded(self, place: int, what: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as failure:
            reason = in_a_line(failure)
            if self._logged.get(place) != reason:
                self._logged[place] = reason
                LOGGER.error("%s: %s; training goes on, and it is called again", what, reason)


def _name(monitor: Monitor) -> str:
    return getattr(monitor, "__qualname__", None) or type(monitor).__qualname__
