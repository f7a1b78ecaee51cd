"""The budget of a search, in evaluations and optionally seconds, and its consumption."""

import time
from collections.abc import Callable

from attrs import define, field

Progress = Callable[[int, int, float], None]
"""Callback with the evaluations done, the budget, and the best step time that fits (infinite while none does)."""


class Stopped(Exception):
    """The search has no time left; its result so far is used."""


@define
class Meter:
    """Counts a search's evaluations.

    Args:
        budget: evaluations it may spend.
        seconds: a time limit, from the creation of the meter; None for no limit.
        progress: see :data:`Progress`.
        clock: seconds from any start.
        until_fit: whether the search ends with the first plan that fits.
        spent: evaluations so far.
        step_s: the best step time that fits.
    """

    budget: int
    seconds: float | None = None
    progress: Progress | None = None
    clock: Callable[[], float] = time.monotonic
    until_fit: bool = False
    spent: int = 0
    step_s: float = float("inf")
    _start: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._start = self.clock()

    @property
    def left(self) -> int:
        """Evaluations not yet spent."""
        return max(self.budget - self.spent, 0)

    @property
    def seconds_left(self) -> float | None:
        """The rest of the time limit; None for no limit."""
        return None if self.seconds is None else max(self.seconds - (self.clock() - self._start), 0.0)

    def spend(self, evaluations: int, step_s: float = float("inf")) -> None:
        """Count evaluations; ``step_s`` is the best step time among them that fits.

        Raises:
            Stopped: the time is up.
        """
        self.spent += evaluations
        self.step_s = min(self.step_s, step_s)
        if self.progress is not None:
            self.progress(min(self.spent, self.budget), self.budget, self.step_s)
        if self.seconds is not None and self.clock() - self._start > self.seconds:
            raise Stopped
