"""Schedules: published ones, plug-ins, and the search for others; needs no torch."""

from .core.costs.costs import StageCosts
from .core.schedules.problem import Schedule, ScheduleProblem
from .core.schedules.registry import families, find_family
from .core.schedules.scored import score
from .core.search.find_schedule import find_schedule

__all__ = [
    "Schedule", "ScheduleProblem", "StageCosts",
    "families", "find_family", "find_schedule", "score",
]  # fmt: skip
