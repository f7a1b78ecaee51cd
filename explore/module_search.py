"""Names of modules for the page's search, in addition to a report's data."""

from typing import Any

from ..core.plan.plan import Plan

MOST_NAMES = 4000
"""Most module names of a stage that the page can search."""


def with_names(data: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The data with the modules of every stage by their whole names, for the search."""
    for stage, shown in zip(plan.stages, data["plan"]["stages"], strict=True):
        modules = dict.fromkeys(name.rpartition("/")[0] or name for name in stage.nodes)
        shown["names"] = list(modules)[:MOST_NAMES]
    return data
