"""``--budget`` and ``--seconds`` of one answer, divided among its searches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define

RESERVED = 0.06
"""Share of a given budget for searches with fewer devices, where they follow."""


@define
class Allowance:
    """What the searches of an answer may still take.

    Args:
        evaluations: of all of them; None if each has its own default.
        seconds: for all of them; None for no limit. Only the time within :meth:`timed` counts.
        clock: seconds from any start.
    """

    evaluations: int | None
    seconds: float | None
    clock: Callable[[], float] = time.monotonic

    def share(self, searches: int, *, reserve: bool = False) -> int | None:
        """Evaluations of the next search, at least one.

        Args:
            searches: how many are left, including the next one.
            reserve: whether searches with fewer devices follow them.
        """
        if self.evaluations is None:
            return None
        return max(int(self.evaluations * (1 - RESERVED if reserve else 1)) // searches, 1)

    def spend(self, evaluations: int) -> None:
        """Count evaluations."""
        if self.evaluations is not None:
            self.evaluations -= evaluations

    @property
    def exhausted(self) -> bool:
        """Whether no evaluations or no time are left."""
        return (self.evaluations is not None and self.evaluations < 1) or (
            self.seconds is not None and self.seconds <= 0
        )

    @contextmanager
    def timed(self, searches: int = 1) -> Iterator[float | None]:
        """Run one search, of the ``searches`` that are left; yields its limit in seconds, or None."""
        start = self.clock()
        try:
            yield None if self.seconds is None else self.seconds / searches
        finally:
            if self.seconds is not None:
                self.seconds -= self.clock() - start
