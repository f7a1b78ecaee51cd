"""Infeasible is an answer: what does not fit, and the smallest changes with which a plan was found that does."""

from typing import Any

from ..core.cluster import Cluster
from ..core.graph import OpGraph
from ..core.plan import Plan
from ..core.planner.infeasible import (
    MORE_DEVICES,
    MORE_MEMORY,
    OFFLOAD,
    SMALLER_MICROBATCHES,
    Change,
    NothingFits,
    Replan,
    excess,
    holding,
    smallest_changes,
)
from .output import bytes_text, seconds_text

BUDGET = 5_000
"""Most evaluations of each further search; its plan is one that fits, and not the fastest."""


class InfeasibleAnswer:
    """What is said when nothing fits.

    Args:
        nothing: what the search found.
        graph: what was planned.
        replan: searches for a plan that fits.
        rows: of the batch of one step, if known.
    """

    def __init__(self, nothing: NothingFits, graph: OpGraph, replan: Replan, rows: int | None) -> None:
        from ..simulators.run import simulate

        timelines = simulate(nothing.closest).timelines
        self.nothing = nothing
        self.held = holding(nothing, timelines)
        self.changes = smallest_changes(nothing, graph, timelines, replan, rows=rows)

    def plain(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        held, closest = self.held, self.nothing.closest
        return {
            "feasible": False,
            "device": held.device,
            "action": None if held.action is None else str(held.action),
            "needs_bytes": held.bytes,
            "limit_bytes": held.limit,
            "excess_bytes": list(excess(self.nothing)),
            "holds_bytes": held.kinds,
            "schedule": closest.schedule,
            "stages": len(closest.stages),
            "changes": [self._plain_change(change) for change in self.changes],
        }

    def text(self) -> str:
        """What people read; the first line says it all in short."""
        held, closest = self.held, self.nothing.closest
        kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in held.kinds.items() if size)
        width = max(len(change.what) for change in self.changes)
        return "\n".join(
            (
                f"nothing found fits: device {held.device} ('{_cluster(closest).devices[held.device].name}') needs "
                f"{bytes_text(held.bytes)} at {held.action} and may hold {bytes_text(held.limit)}; "
                f"smallest change that fits: {self._words(self.changes[0])}",
                f"  comes closest: {closest.schedule} of {len(closest.stages)} stages",
                f"  device {held.device} holds at {held.action}: {kinds}",
                "  with each of these alone a plan was found that fits:",
                *(f"    {change.what:<{width}}  {self._words(change)}" for change in self.changes),
            )
        )

    def _words(self, change: Change) -> str:
        closest, value = self.nothing.closest, change.value
        step = f", step at most {seconds_text(_step_s(change.found))}"
        if change.what == MORE_DEVICES:
            return f"{value:.0f} devices in place of {closest.devices}{step}"
        if change.what == SMALLER_MICROBATCHES:
            parts = value / closest.microbatches
            return f"{value:.0f} microbatches in place of {closest.microbatches}, each 1/{parts:.0f} the size{step}"
        if change.what == OFFLOAD:
            return f"{bytes_text(value)} of saved tensors to the host, by hand: no runner of this version does it"
        assert change.what == MORE_MEMORY
        return f"{bytes_text(value)} more a device{step}"

    def _plain_change(self, change: Change) -> dict[str, Any]:
        unit = {MORE_DEVICES: "devices", SMALLER_MICROBATCHES: "microbatches"}.get(change.what, "bytes")
        return {
            "change": change.what,
            unit: change.value,
            "step_s": _step_s(change.found),
            "schedule": change.found.schedule,
        }


def _cluster(plan: Plan) -> Cluster:
    assert plan.prediction is not None
    return plan.prediction.cluster


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
