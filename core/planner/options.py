"""The schedules that a search chooses among."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ..actions import Kind
from ..cluster import Cluster
from ..costs import StageCosts, StageEdge
from ..errors import RequestError
from ..schedules.problem import Schedule, ScheduleFamily, ScheduleProblem

MAX_CHUNKS = 8


@frozen
class Option:
    """One family with one set of parameters and a number of chunks."""

    family: ScheduleFamily
    parameters: Mapping[str, Any]
    chunks: int

    def build(self, problem: ScheduleProblem) -> Schedule | None:
        """The schedule, or None where the family is not made for the problem."""
        try:
            return self.family.build(problem, **self.parameters)
        except RequestError:
            return None


def options(families: Iterable[ScheduleFamily], chunks: Iterable[int]) -> list[Option]:
    """Every family with every set of its parameters, at every number of chunks."""
    return [
        Option(family, parameters, count) for count in chunks for family in families for parameters in family.candidates
    ]


def schedule_problem(
    cluster: Cluster,
    microbatches: int,
    costs: Sequence[StageCosts],
    edges: Sequence[StageEdge],
    limits: Sequence[float],
) -> ScheduleProblem:
    """The problem that a builder sees for stages with known costs, placed round robin.

    A hop takes the mean over the edges between devices; the memory for saved tensors is that of the device with the
    least to spare beside its state and its largest workspace.
    """
    devices = len(cluster.devices)
    hops = [
        cluster.transfer_s(edge.src % devices, edge.dst % devices, edge.bytes)
        for edge in edges
        if edge.src % devices != edge.dst % devices
    ]
    spare = []
    for device in range(devices):
        own = costs[device::devices]
        spare.append(limits[device] - sum(c.state_bytes for c in own) - max(c.workspace_bytes for c in own))
    return ScheduleProblem(
        devices=devices,
        microbatches=microbatches,
        chunks=len(costs) // devices,
        costs=tuple(costs),
        hop_s=sum(hops) / len(hops) if hops else 0.0,
        memory_limit=max(min(spare), 0.0),
    )


def in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Per stage, how many microbatches its device holds of it when it holds the most of all its stages."""
    held = [0.0] * len(schedule.placement)
    most = list(held)
    for device, actions in enumerate(schedule.device_actions):
        own = [stage for stage, place in enumerate(schedule.placement) if place == device]
        peak = 0.0
        for action in actions:
            if action.kind is Kind.F:
                held[action.stage] += 1
            elif action.kind in (Kind.B, Kind.W):
                held[action.stage] -= 1
            now = sum(held[stage] for stage in own)
            if now > peak:
                peak = now
                for stage in own:
                    most[stage] = held[stage]
    return tuple(most)
