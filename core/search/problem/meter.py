"""The budget of a search, in evaluations and optionally seconds, and its consumption."""

import time
from collections.abc import Callable

from attrs import define, evolve, field

Progress = Callable[[int, int, float], None]
"""Callback with the evaluations done, the budget, and the best step time that fits (infinite while none does)."""


class Stopped(Exception):
    """The search has no time left; its result so far is used."""


@define
class Meter:
    """Counts a search's evaluations.

    Args:
        budget: evaluations it may spend.
        most: evaluations that all parts of a search may spend together; None for no bound but each part's budget.
        seconds: a time limit, from the creation of the meter; None for no limit.
        progress: see :data:`Progress`.
        until_fit: whether the search ends with the first plan that fits.
        spent: evaluations so far.
        step_s: the best step time that fits.
    """

    budget: int
    seconds: float | None = None
    progress: Progress | None = None
    until_fit: bool = False
    most: int | None = None
    spent: int = 0
    step_s: float = float("inf")
    _start: float = field(init=False)
    _before: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._start = time.monotonic()

    @property
    def left(self) -> int:
        """Evaluations not yet spent."""
        return max(min(self.budget, self.budget if self.most is None else self.most) - self.spent, 0)

    @property
    def exhausted(self) -> bool:
        """Whether no evaluations are left for further parts."""
        return self.most is not None and self.spent >= self.most

    def part(self, budget: int, *, until_fit: bool = False) -> "Meter":
        """A meter for a further part of the search, with the same end in time. Its owner adds what it spent.

        Args:
            budget: of the part, if as many evaluations are left.
            until_fit: whether the part ends with the first plan that fits.
        """
        most = None if self.most is None else max(self.most - self.spent, 0)
        part = evolve(self, budget=budget, most=most, until_fit=until_fit, spent=0)
        part._start, part._before = self._start, self._before + self.spent
        return part

    def spend(self, evaluations: int, step_s: float = float("inf")) -> None:
        """Count evaluations; ``step_s`` is the best step time among them that fits.

        Raises:
            Stopped: the time is up.
        """
        self.spent += evaluations
        self.report(step_s)
        if self.seconds is not None and time.monotonic() - self._start > self.seconds:
            raise Stopped

    def report(self, step_s: float) -> None:
        """Call ``progress``; ``step_s`` is another step time that fits."""
        self.step_s = min(self.step_s, step_s)
        if self.progress is not None:
            done = self._before + self.spent
            total = max(done, self._before + self.budget) if self.most is None else self._before + self.most
            self.progress(min(done, total), total, self.step_s)
