"""The reduction of a tied weight's gradient over the stages that hold a replica of it.

Once all of them are there, each device sends what its stages have to the device of the first, which adds it up and
sends the sum back. It is what the runtimes do, and here it is over links that others may be using.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from simpy.events import Timeout

from ..core.cluster.cluster import Cluster
from ..core.errors import RequestError
from ..core.plan.messages import Exchange
from ..core.plan.plan import Plan, TiedWeight
from .device import DeviceQueue
from .gradients import GradientReduction, step_positions
from .network import Network, Shipment
from .waiting import Delays, added, lost


class TiedReduction:
    """One tied weight in one replica of the pipeline.

    Args:
        network: whose links it crosses.
        cluster: its devices in the order of ranks.
        weight: which.
        readers: per stage the rank of its device, the queue of that, and the operation that waits: its STEP.

    Attributes:
        gather, scatter: what is sent to the first stage's device, and back.
        on_end: called when all have the sum.
        joined_s: when each stage joined.
        start_s, end_s: when all had joined, and when all had the sum.
    """

    def __init__(
        self,
        network: Network,
        cluster: Cluster,
        weight: TiedWeight,
        readers: Mapping[int, tuple[int, DeviceQueue, int]],
    ) -> None:
        self.network = network
        self.weight = weight
        self.readers = readers
        self.on_end: list[Callable[[], None]] = []
        self.joined_s: dict[int, float] = {}
        self.start_s = 0.0
        self.end_s = 0.0
        self.missing = dict.fromkeys(readers, 1)
        first = readers[weight.stages[0]][0]
        stages = Counter(rank for rank, _, _ in readers.values() if rank != first)
        self.gather = [self._shipment(cluster, rank, first, count) for rank, count in stages.items()]
        self.scatter = [self._shipment(cluster, first, rank, count) for rank, count in stages.items()]
        self.under_way = 0
        self.gathered = False
        for _, device, operation in readers.values():
            device.pending[operation] += 1

    def _shipment(self, cluster: Cluster, src: int, dst: int, count: int) -> Shipment:
        path = cluster.path(src, dst)
        latency_s = sum(link.latency_s for link, _ in path)
        route = self.network.route(path, latency_s, min(link.bytes_per_s for link, _ in path))
        return Shipment(route, count * self.weight.bytes, self._arrived)

    @property
    def queues(self) -> list[DeviceQueue]:
        """Of the devices that hold a replica."""
        return [device for _, device, _ in self.readers.values()]

    @property
    def contention(self) -> Delays:
        """By full link, how much later all had the sum: of what was gathered and of what went back, the slowest."""
        slowest = [max(part, key=_arrival_s).times for part in (self.gather, self.scatter) if part]
        return added(lost(flow) for flow in slowest)

    def close(self) -> None:
        """Let go of everything, so that it is freed at once."""
        self.on_end.clear()
        self.gather.clear()
        self.scatter.clear()

    def expect(self, stage: int) -> None:
        """A stage joins by one thing more."""
        self.missing[stage] += 1

    def join(self, stage: int) -> None:
        """A thing by which a stage joins: it has its part of the gradient."""
        self.missing[stage] -= 1
        if not self.missing[stage]:
            self.joined_s[stage] = self.network.environment.now
        if len(self.joined_s) < len(self.readers):
            return
        self.start_s = self.network.environment.now
        if self.gather:
            self._start(self.gather)
        else:  # the end is an event, as every arrival is, even where nothing moves
            Timeout(self.network.environment, 0.0).callbacks.append(lambda _: self._finish())

    def _start(self, shipments: Sequence[Shipment]) -> None:
        self.under_way = len(shipments)
        for shipment in shipments:
            self.network.start(shipment)

    def _arrived(self) -> None:
        self.under_way -= 1
        if self.under_way:
            return
        if self.gathered:
            self._finish()
        else:
            self.gathered = True
            self._start(self.scatter)

    def _finish(self) -> None:
        self.end_s = self.network.environment.now
        for call in self.on_end:
            call()
        for _rank, device, operation in self.readers.values():
            device.arrived(operation)


def _arrival_s(shipment: Shipment) -> float:
    return shipment.drained_s + shipment.route.latency_s


def tied_reductions(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    exchange: Exchange,
    devices: Sequence[DeviceQueue],
    gradients: Sequence[GradientReduction],
) -> list[TiedReduction]:
    """The reduction of every tied weight in every replica, joined where its stages' devices issue REDUCE_TIED.

    Args:
        network: whose links they cross.
        plan: its tied weights.
        cluster: its devices in the order of ranks.
        exchange: the lowered plan with all its replicas.
        devices: by rank, not yet begun.
        gradients: over a data dimension these sums come first.

    Raises:
        RequestError: a stage that holds a tied weight does not issue REDUCE_TIED, or has no STEP.
    """
    steps = step_positions(exchange)
    reduced = {reduction.stage: reduction for reduction in gradients}
    result = []
    for first in range(0, plan.mesh.ranks, plan.devices):
        issued = {stage: at for tied in exchange.reductions[first : first + plan.devices] for at, stage in tied}
        for weight in plan.tied:
            ranks = {stage: first + plan.placement[stage] for stage in weight.stages}
            absent = next((s for s, rank in ranks.items() if s not in issued or (rank, s) not in steps), None)
            if absent is not None:
                raise RequestError(
                    f"stage {absent} holds the tied weight '{weight.name}' and issues no REDUCE_TIED with a STEP "
                    "behind it: add them"
                )
            readers = {stage: (rank, devices[rank], steps[rank, stage]) for stage, rank in ranks.items()}
            reduction = TiedReduction(network, cluster, weight, readers)
            for stage, rank in ranks.items():
                join = partial(reduction.join, stage)
                devices[rank].between[issued[stage]].append(join)
                if stage in reduced:
                    reduction.expect(stage)
                    reduced[stage].on_end.append(join)
            result.append(reduction)
    return result
