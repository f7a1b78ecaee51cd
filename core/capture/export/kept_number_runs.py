"""Tests by trial runs whether numbers that a step keeps in Python affect its tensors, or only texts and Python objects.

The numbers are replaced by kept numbers (`..values.kept_numbers`), and every condition on one is decided both ways:

    a run as it is ──▶ a run with kept numbers            the same operators?
                         └─ for each condition ──▶ a run with the other side, and one after it
                                                          the same operators?

The run after it shows the effect of a value that the other side set, such as another factor of the loss. A text that
contains a kept number must be printed, logged or stored; otherwise the step may have compared it.
"""

import builtins
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from attrs import frozen

from ..python.reached import Reached
from ..values.kept_numbers import Followed, KeptNumber
from .run_record import RecordedOperator, first_difference
from .trial_runs import Leaves, TrialRuns

MAX_SIDES = 6
"""Largest number of runs with another side of a condition."""


@frozen
class KeptNumberEffect:
    """The effect of kept numbers, as trial runs show it.

    Args:
        differs: the first operator that another number changes; None if there is none.
        complete: whether all conditions were decided both ways, and nothing else needed a number.
    """

    differs: RecordedOperator | None
    complete: bool


def follow_kept(runs: TrialRuns, leaves: Leaves, names: Collection[Any]) -> KeptNumberEffect:
    """Follow the numbers that a step keeps.

    Args:
        runs: of the step.
        leaves: of a batch.
        names: of the attributes and variables, or keys, that hold the numbers.
    """
    with runs.apart():
        runs.run(leaves)  # may set something up
        known, followed = runs.run(leaves), Followed()
        sides: list[tuple[bool, ...]] = [()]
        for _ in range(1 + MAX_SIDES):
            if not sides:
                return KeptNumberEffect(None, True)
            forced = sides.pop(0)
            followed.begin(forced)
            found = _run(runs, leaves, names, followed)
            taken = tuple(followed.taken)
            sides += [(*taken[:place], not taken[place]) for place in range(len(forced), len(taken))]
            followed.begin()
            later = _run(runs, leaves, names, followed) if forced else found
            if followed.escaped or not runs.ended:
                return KeptNumberEffect(None, False)
            differs = first_difference(known, found) or first_difference(known, later)
            if differs is not None:
                return KeptNumberEffect(differs, True)
    return KeptNumberEffect(None, not sides)


def _run(runs: TrialRuns, leaves: Leaves, names: Collection[Any], followed: Followed) -> list[RecordedOperator]:
    """A run in which kept numbers replace the numbers of these names."""
    now = runs.now()
    numbers = {place: now.number(place) for place, (_, name) in now.owners.items() if name in names}
    for place, number in numbers.items():
        now.assign(place, KeptNumber(number, followed))
    try:
        with _texts_noted(followed):
            ran = runs.run(leaves)
        followed.arrive(_stored(runs.now()))
        followed.escaped |= not followed.all_arrived()
        return ran
    finally:
        _restore(now, numbers)


@contextmanager
def _texts_noted(followed: Followed) -> Iterator[None]:
    """Within this context, texts that are printed or logged are recorded."""

    def noting(function: Any, first: int = 0) -> Any:
        def noted(*values: Any, **options: Any) -> Any:
            followed.arrive(values[first:])
            return function(*values, **options)

        return noted

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "print", noting(builtins.print)))
        for name in ("debug", "info", "warning", "error", "critical", "log"):  # the level may be disabled now
            stack.enter_context(mock.patch.object(logging.Logger, name, noting(getattr(logging.Logger, name), 1)))
        for stream in (sys.stdout, sys.stderr):
            stack.enter_context(mock.patch.object(stream, "write", noting(stream.write)))
        yield


def _stored(now: Reached) -> Iterator[Any]:
    """What attributes, variables and sequences hold that the step reaches."""
    for place in now.owners:
        key: Any = now.values[place]  # with the value last
        yield key[1]
    for _, (held, _) in now.named_sequences():
        yield from held


def _restore(now: Reached, numbers: dict[str, Any]) -> None:
    for place, number in numbers.items():
        now.assign(place, number)
