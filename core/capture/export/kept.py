"""Whether numbers that a step keeps in Python only reach texts and Python objects, found by trial runs.

The numbers are replaced by kept numbers (`..values.kept_numbers`), and every condition on one is decided both ways:

    a run as it is ──▶ a run with kept numbers            the same operators?
                         └─ for each condition ──▶ a run with the other side, and one after it
                                                          the same operators?

The run after it shows a value that the other side set, such as another factor of the loss.
"""

from collections.abc import Collection
from typing import Any

from attrs import frozen

from ..python.reached import Reached
from ..values.kept_numbers import Followed, KeptNumber
from .recorded import Ran, first_difference
from .trial_runs import Leaves, TrialRuns

MAX_SIDES = 6
"""Largest number of runs with another side of a condition."""


@frozen
class Found:
    """What trial runs show of kept numbers.

    Args:
        differs: the first operator that another number changes; None if there is none.
        complete: whether all conditions were decided both ways, and nothing else needed a number.
    """

    differs: Ran | None
    complete: bool


def follow_kept(runs: TrialRuns, leaves: Leaves, names: Collection[Any]) -> Found:
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
                return Found(None, True)
            forced = sides.pop(0)
            followed.begin(forced)
            found = _run(runs, leaves, names, followed)
            taken = tuple(followed.taken)
            sides += [(*taken[:place], not taken[place]) for place in range(len(forced), len(taken))]
            followed.begin()
            later = _run(runs, leaves, names, followed) if forced else found
            if followed.escaped or not runs.ended:
                return Found(None, False)
            differs = first_difference(known, found) or first_difference(known, later)
            if differs is not None:
                return Found(differs, True)
    return Found(None, not sides)


def _run(runs: TrialRuns, leaves: Leaves, names: Collection[Any], followed: Followed) -> list[Ran]:
    """A run in which kept numbers replace the numbers of these names."""
    now = runs.now()
    numbers = {place: now.number(place) for place, (_, name) in now.owners.items() if name in names}
    for place, number in numbers.items():
        now.assign(place, KeptNumber(number, followed))
    try:
        return runs.run(leaves)
    finally:
        _restore(now, numbers)


def _restore(now: Reached, numbers: dict[str, Any]) -> None:
    for place, number in numbers.items():
        now.assign(place, number)
