"""The error of a search in which no plan fits: the closest plan, and what the device with the largest excess holds.

The text that ``panpipe plan`` prints about it, with the changes that help, is in `answers/plan/infeasible`.
"""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any, Self

from attrs import frozen

from ...actions import Action
from ...costs.graph import OpGraph, OpNode
from ...errors import InfeasibleError
from ...lowering.residency import Timeline
from ...plan.plan import Plan, parse_plan, plan_json


class NothingFits(InfeasibleError):
    """No plan was found that fits in the memory of every device.

    Args:
        message: one line.
        closest: the plan that exceeds the limits by the fewest bytes, with its prediction.
        limits: bytes that each device may hold.
    """

    def __init__(self, message: str, closest: Plan, limits: Sequence[float]) -> None:
        super().__init__(message)
        self.closest = closest
        self.limits = tuple(limits)

    def details(self) -> dict[str, Any]:
        limits = [float(limit) if isfinite(limit) else None for limit in self.limits]  # JSON has no infinity
        return {"closest": plan_json(self.closest), "limits": limits}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        limits = [inf if limit is None else limit for limit in details["limits"]]
        return cls(message, parse_plan(details["closest"], "the closest plan"), limits)


def operator_bytes(node: OpNode, *, saves: bool = True, parts: int = 1) -> float:
    """Bytes that the device of an operator holds while it runs, with one microbatch.

    Args:
        saves: whether its saved tensors stay on the device.
        parts: the microbatch is one of this many equal parts of the graph's.
    """
    return node.resident_bytes + (node.saved_bytes / parts if saves else 0) + node.workspace_bytes / parts


def too_large(graph: OpGraph, limit: float, *, saves: bool = True) -> OpNode | None:
    """The operator that needs most, if no device of ``limit`` bytes can hold it; otherwise None."""
    largest = max(graph.nodes, key=lambda node: operator_bytes(node, saves=saves))
    return largest if operator_bytes(largest, saves=saves) > limit else None


def excess_bytes(peaks: Sequence[float], limits: Sequence[float]) -> tuple[float, ...]:
    """Bytes by which each device exceeds its limit; 0 if it does not."""
    return tuple(max(peak - limit, 0.0) for peak, limit in zip(peaks, limits, strict=True))


def excess(plan: Plan, limits: Sequence[float]) -> tuple[float, ...]:
    """Bytes by which each device exceeds its limit, by the plan's prediction."""
    return excess_bytes(plan.predicted.peak_memory_bytes, limits)


@frozen
class Holding:
    """What a device holds at its peak, without messages in flight.

    Args:
        device: its number.
        action: the action at the peak.
        kinds: bytes by kind.
        limit: bytes that it may hold.
    """

    device: int
    action: Action | None
    kinds: dict[str, float]
    limit: float

    @property
    def bytes(self) -> float:
        """The sum over all kinds."""
        return sum(self.kinds.values())


def holding(plan: Plan, limits: Sequence[float], timelines: Sequence[Timeline]) -> Holding:
    """What the device that exceeds its limit most holds at its peak.

    Args:
        limits: bytes that each device may hold.
        timelines: of the plan's memory, by device.
    """
    above = excess(plan, limits)
    device = above.index(max(above))
    timeline = timelines[device]
    worst = int(timeline.working.argmax())
    kinds = timeline.at(worst)
    del kinds["communication"]
    action = timeline.actions[int(timeline.operations[worst])] if timeline.actions else None
    return Holding(device, action, kinds, limits[device])
