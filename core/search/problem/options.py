"""The choices of a search: the schedules to choose among, orders, stages per device, recomputation."""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from ...errors import InfeasibleError, RequestError
from ...policies.recompute import Recompute
from ...schedules.problem import Schedule, ScheduleFamily, ScheduleProblem

MAX_CHUNKS = 8


@frozen
class Option:
    """One family with one set of parameters, for a number of chunks."""

    family: ScheduleFamily
    parameters: Mapping[str, Any]
    chunks: int

    def placement(self, devices: int) -> tuple[int, ...]:
        """Device of every stage."""
        return self.family.placement(devices, self.chunks)

    def build(self, problem: ScheduleProblem) -> Schedule | None:
        """The schedule, or None if the family does not support the problem or finds no schedule within its memory."""
        try:
            return self.family.build(problem, **self.parameters)
        except (RequestError, InfeasibleError):
            return None


def options(families: Iterable[ScheduleFamily], problem: ScheduleProblem) -> list[Option]:
    """Every family that supports the problem, with each of its candidate parameter sets."""
    return [
        Option(family, parameters, problem.chunks)
        for family in families
        if family.supports(problem)
        for parameters in family.candidates(problem)
    ]


@frozen
class SearchSpace:
    """The choices of a search.

    Args:
        families: the schedules to choose among.
        anneal: whether orders may differ from the families'.
        chunks: fewest and most stages per device.
        recompute: see ``SearchOptions``.
    """

    families: tuple[ScheduleFamily, ...]
    anneal: bool = True
    chunks: tuple[int, int] = (1, MAX_CHUNKS)
    recompute: Recompute | None = "none"
