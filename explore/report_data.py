"""Additions to a report's data that only the explorer needs."""

from typing import Any

from ..core.evaluate.idle import IdleTime
from ..core.plan.plan import Plan
from ..core.report.data import idle_data

MOST_NAMES = 4000
"""Most module names of a stage that the page can search."""


def with_names(data: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The data with the modules of every stage by their whole names, for the search."""
    for stage, shown in zip(plan.stages, data["plan"]["stages"], strict=True):
        modules = dict.fromkeys(name.rpartition("/")[0] or name for name in stage.nodes)
        shown["names"] = list(modules)[:MOST_NAMES]
    return data


def plain_idle(idle: IdleTime | None) -> dict[str, Any] | None:
    """The idle time by cause, as plain data for the page."""
    return None if idle is None else idle_data(idle)
