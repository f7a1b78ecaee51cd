"""The choices of a search: the schedules to choose among, orders, stages per device, recomputation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ...cluster.cluster import Cluster
from ...costs.costs import StageCosts, StageEdge
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


def schedule_problem(
    cluster: Cluster,
    microbatches: int,
    *,
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    edges: Sequence[StageEdge],
    limits: Sequence[float],
    positions: Sequence[int] | None = None,
) -> ScheduleProblem:
    """The input of a schedule's builder for stages with known costs.

    The hop delay is the mean over the edges between devices. The memory for saved tensors is the smallest over devices
    of limit − state − largest workspace. ``positions`` are the cluster's devices along the pipeline; by default all in
    their order.
    """
    devices = range(len(cluster.devices)) if positions is None else positions
    hops = [
        cluster.transfer_s(devices[placement[edge.src]], devices[placement[edge.dst]], edge.bytes)
        for edge in edges
        if placement[edge.src] != placement[edge.dst]
    ]
    spare = []
    for device, limit in enumerate(limits):
        own = [cost for cost, place in zip(costs, placement, strict=True) if place == device]
        spare.append(limit - sum(c.state_bytes for c in own) - max((c.workspace_bytes for c in own), default=0))
    return ScheduleProblem(
        devices=len(devices),
        microbatches=microbatches,
        chunks=len(costs) // len(devices),
        costs=tuple(costs),
        hop_s=sum(hops) / len(hops) if hops else 0.0,
        memory_limit=max(min(spare), 0.0),
    )


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
