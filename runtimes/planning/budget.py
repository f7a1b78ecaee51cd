"""The budget of automatic planning: numbers of evaluations and repeats, and a limit in seconds.

The numbers follow from the problem, so that the same request gives the same plan on a fast and on a slow machine. The
limit in seconds is a cap: what it shortens is recorded and reported. Clocks of ranks differ: one rank reads its clock
and decides for all.
"""

import time
from collections.abc import Callable

from attrs import define, field

from ...core.errors import RequestError
from ..launch.team import Team

CUT_ACTIONS, ORDER_ACTIONS = 2_000_000, 10_000_000
"""Compute actions that one search for cuts, and one for orders, evaluates: some tenths of a second on one core."""
LEAST_EVALUATIONS = 2_000
"""Smallest number of evaluations of a search, for any number of actions."""
MOST_OVERRUN = 0.5
"""Share of the default limit by which the first rehearsed step may exceed it."""
DEFAULT_S, DEFAULT_STEPS = 10.0, 4
"""The default limit: this many seconds, or the time of this many training steps if that is longer: with fewer, a long
step would not be rehearsed."""


@define(eq=False)
class Budget:
    """The budget of one automatic plan.

    Args:
        team: the devices; the rank of the first one reads the clock.
        seconds: the limit, counted from the creation of the budget; None for no limit.
        clock: the current time in seconds.
        shortened: what the limit shortened so far, each once; complete only on the rank of the first device.
    """

    team: Team
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    shortened: list[str] = field(factory=list)
    _start: float = field(init=False)
    _grows: bool = field(default=False, init=False)

    @classmethod
    def of(cls, team: Team, seconds: float | None) -> "Budget":
        """The budget of a request: the user's limit, or the default, which grows with the step."""
        if seconds is not None:
            return cls(team, seconds)
        budget = cls(team, DEFAULT_S)
        budget._grows = True
        return budget

    @property
    def given(self) -> bool:
        """Whether the limit is the user's: what it has no time for is left out, whatever that is."""
        return self.seconds is not None and not self._grows

    def expect_step(self, step_s: float) -> None:
        """Raise the default limit for long training steps, given in seconds; the same on every rank."""
        if self._grows and self.seconds is not None:
            self.seconds = max(self.seconds, DEFAULT_STEPS * step_s)

    def __attrs_post_init__(self) -> None:
        check_seconds(self.seconds)
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now."""
        self._start = self.clock()

    @property
    def left_s(self) -> float | None:
        """Seconds left by this rank's clock; None without a limit. Only for work that one rank does for all."""
        return None if self.seconds is None else max(self.seconds - (self.clock() - self._start), 1e-3)

    def cut_evaluations(self, microbatches: int) -> int:
        """Number of evaluations of one search for cuts, for a step of this many microbatches."""
        return self._evaluations(CUT_ACTIONS, microbatches)

    def order_evaluations(self, microbatches: int) -> int:
        """Number of evaluations of one search for the orders of measured stages."""
        return self._evaluations(ORDER_ACTIONS, microbatches)

    def _evaluations(self, actions: int, microbatches: int) -> int:
        return max(actions // (6 * self.team.size * microbatches), LEAST_EVALUATIONS)

    def searched(self, what: str) -> None:
        """Record at the end of a search whether the limit ended it early; called on the rank that searched."""
        if self.seconds is not None and self.clock() - self._start >= self.seconds:
            self._shorten(what)

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for ``what``, which takes about this many seconds: the same on every rank.

        All ranks call this at the same time. A refusal is recorded.
        """
        return self.repeats(what, seconds, 1, least=0) == 1

    def allows_least(self, what: str, seconds: float) -> bool:
        """As `allows`, for work without which a prediction has no interval: it may exceed the default limit by
        ``MOST_OVERRUN``.

        A limit of the user's is kept.
        """
        if self.seconds is None:
            return True
        late_s = 0.0 if self.given else MOST_OVERRUN * self.seconds
        return self.team.decide(lambda: self._affordable(what, seconds, 1, 0, late_s)) == 1

    def repeats(self, what: str, each_s: float, wanted: int, least: int = 1) -> int:
        """The number of repeats of work that takes about ``each_s`` seconds, the same on every rank.

        All ranks call this at the same time; the ``each_s`` of the first device's rank counts.

        Args:
            what: the work, for the report, such as ``"rehearsing"``.
            each_s: seconds of one repeat.
            wanted: number of repeats without a limit in seconds.
            least: smallest number of repeats.
        """
        if self.seconds is None:
            return wanted
        return self.team.decide(lambda: self._affordable(what, each_s, wanted, least))

    def _affordable(self, what: str, each_s: float, wanted: int, least: int, late_s: float = 0.0) -> int:
        assert self.seconds is not None
        left = self.seconds + late_s - (self.clock() - self._start)
        affordable = 0 if left <= 0 else wanted if each_s <= 0 else int(left / each_s)
        if affordable < wanted:
            self._shorten(what)
        return max(min(affordable, wanted), least)

    def _shorten(self, what: str) -> None:
        if what not in self.shortened:
            self.shortened.append(what)


def check_seconds(seconds: float | None) -> None:
    """Refuse a limit that is not a number above 0.

    Raises:
        RequestError: it is not.
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds < float("inf")):
        raise RequestError(f"plan_seconds is {seconds!r}: give a number of seconds above 0, or None for no limit")
