"""Detects that training steps take another time than planned, for a while.

    interval of the plan      ├────────┤
    typical step of a window        ●                        as planned
                                                ●            drift

A plan without an interval is compared with its own first steps.
"""

import statistics
from collections import deque

from attrs import define, field

from ...core.errors import RequestError
from ...core.plan.plan import Plan

WINDOW = 12
"""Steps whose median is compared: single steps vary, and a short disturbance is no drift."""
WARM_UP = 3
"""Steps after a change of the plan that are not counted: they compile, and allocate memory."""
MARGIN = 0.1
"""Share by which the median must be outside the interval: moving stages takes as long as some steps."""
FIRST_STEPS = 0.15
"""Half of the interval around the median of the first steps, as a share, for a plan without an interval."""
LONGEST = 64
"""Largest number of windows between two attempts that found nothing better."""


@define(eq=False)
class DriftWatch:
    """Compares the times of steps with a plan.

    Args:
        plan: with its prediction, if it has one.

    Attributes:
        typical_s: median of the last ``WINDOW`` steps, in seconds; None before there are as many.
    """

    plan: Plan
    _expected: tuple[float, float] | None = field(init=False)
    _times: deque[float] = field(factory=lambda: deque(maxlen=WINDOW), init=False)
    _ignored: int = field(default=WARM_UP, init=False)
    _pause: int = field(default=1, init=False)

    @_expected.default
    def _interval(self) -> tuple[float, float] | None:
        return None if self.plan.prediction is None else self.plan.prediction.interval_s

    def note(self, step_s: float) -> None:
        """Record the seconds of a step."""
        if self._ignored:
            self._ignored -= 1
        else:
            self._times.append(step_s)

    @property
    def typical_s(self) -> float | None:
        return statistics.median(self._times) if len(self._times) == WINDOW else None

    def drifted(self) -> bool:
        """Whether the last steps are outside the interval; the first steps set it if the plan has none."""
        typical = self.typical_s
        if typical is None:
            return False
        if self._expected is None:
            self._accept(typical)
            return False
        low, high = self._expected
        return not low * (1 - MARGIN) <= typical <= high * (1 + MARGIN)

    def keep(self) -> None:
        """Take the present times as those of the plan, because no other plan gains; wait longer before the next try."""
        typical = self.typical_s
        if typical is not None:
            self._accept(typical)
        self._ignored = WINDOW * self._pause
        self._pause = min(2 * self._pause, LONGEST)

    def _accept(self, typical: float) -> None:
        self._expected = typical * (1 - FIRST_STEPS), typical * (1 + FIRST_STEPS)
        self._times.clear()


def check_replan(given: object) -> None:
    """Refuse a value of ``replan`` other than None and ``"auto"``."""
    if given not in (None, "auto"):
        raise RequestError(f"replan is {given!r}: give 'auto', or None and call pipe.replan()")
