"""The reduction of gradients over replicas.

A device computes on after its ``REDUCE_GRAD``; the reduction occupies links alone::

    replica 0, compute   ... 1B7 │ 0B6 │ 0B7 │ ......... 1STEP
                                 ▼ joins                 ▲
    devices of 1               [ reduction of stage 1 ]──┤      starts with the last replica, contends with messages
                                   ▲ joins               ▼
    replica 1, compute      ... 1B7 │ 0B6 │ 0B7 │ ...... 1STEP

A stage's gradients travel in one bucket, when its last backward has ended. Over the same devices one reduction runs at
a time, in the order issued, as on a communicator's stream.
"""

from collections.abc import Callable, Sequence
from functools import partial

from ..core.actions import Kind
from ..core.cluster.cluster import Cluster
from ..core.cluster.collectives import collective_phases
from ..core.costs.costs import StageCosts
from ..core.plan.messages import Exchange
from ..core.plan.plan import Plan
from .collectives import Collective
from .device import DeviceQueue
from .network import Network


class GradientReduction:
    """The gradients of one stage, summed over its replicas by an all-reduce: one bucket.

    Args:
        collective: what moves them.
        stage: whose.
        bytes: of one replica's gradients.
        members: per replica the rank of its device, the queue of that, and the operation that waits: the stage's STEP.

    Attributes:
        joined_s: when each rank issued it.
    """

    def __init__(
        self, collective: Collective, stage: int, size: float, members: Sequence[tuple[int, DeviceQueue, int]]
    ) -> None:
        self.collective = collective
        self.stage = stage
        self.bytes = size
        self.members = members
        self.joined_s: dict[int, float] = {}
        for _, device, operation in members:
            device.pending[operation] += 1
        collective.on_end.append(self._release)

    @property
    def queues(self) -> list[DeviceQueue]:
        """Of the devices that hold a replica of the stage."""
        return [device for _, device, _ in self.members]

    @property
    def ranks(self) -> list[int]:
        """Of these devices."""
        return [rank for rank, _, _ in self.members]

    @property
    def on_end(self) -> list[Callable[[], None]]:
        """Called when the sums are there."""
        return self.collective.on_end

    @property
    def complete(self) -> bool:
        """Whether every replica has issued it."""
        return len(self.joined_s) == len(self.members)

    def close(self) -> None:
        """Let go of everything, so that it is freed at once."""
        self.collective.close()

    def _release(self) -> None:
        for _, device, operation in self.members:
            device.arrived(operation)


class Communicator:
    """The reductions over the same devices, one after another.

    Args:
        reductions: in the order in which every member issues them.
    """

    def __init__(self, reductions: Sequence[GradientReduction]) -> None:
        self.reductions = reductions
        self.begun = 0
        for reduction in reductions:
            reduction.on_end.append(self._advance)

    def join(self, reduction: GradientReduction, rank: int) -> None:
        """A replica has its part of the gradients."""
        reduction.joined_s[rank] = reduction.collective.network.environment.now
        if reduction is self.reductions[self.begun] and reduction.complete:
            reduction.collective.start()

    def _advance(self) -> None:
        self.begun += 1
        if self.begun < len(self.reductions) and self.reductions[self.begun].complete:
            self.reductions[self.begun].collective.start()


def step_positions(exchange: Exchange) -> dict[tuple[int, int], int]:
    """For (rank, stage) the position of its STEP."""
    return {
        (rank, action.stage): position
        for rank, actions in enumerate(exchange.operations)
        for position, action in enumerate(actions)
        if action.kind is Kind.STEP
    }


def gradient_reductions(
    network: Network,
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    exchange: Exchange,
    devices: Sequence[DeviceQueue],
) -> list[GradientReduction]:
    """The reduction of every stage over its replicas, joined where their devices issue REDUCE_GRAD.

    Each by the algorithm that is fastest alone. Those of one position stand together, in the order issued.

    Args:
        network: whose links they cross.
        plan, costs: what is reduced.
        cluster: its devices in the order of ranks.
        exchange: the lowered plan with all its replicas.
        devices: by rank, not yet begun.
    """
    if plan.mesh.data == 1:
        return []
    steps = step_positions(exchange)
    result = []
    for position in range(plan.devices):
        ranks = range(position, plan.mesh.ranks, plan.devices)
        issued = exchange.gradients[position]
        reductions = []
        for _, stage in issued:
            size = costs[stage].gradient_bytes
            members = [(rank, devices[rank], steps[rank, stage]) for rank in ranks]
            collective = Collective(network, collective_phases(cluster, ranks, size))
            reductions.append(GradientReduction(collective, stage, size, members))
        communicator = Communicator(reductions)
        for (at, _), reduction in zip(issued, reductions, strict=True):
            for rank in ranks:
                devices[rank].between[at].append(partial(communicator.join, reduction, rank))
        result += reductions
    return result
