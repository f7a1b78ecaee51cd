"""How much of each link and of each host's memory a step used, and the copies between devices and hosts."""

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ..core.actions import Kind
from ..core.cluster.cluster import Cluster
from ..core.lowering.residency import Timeline, most_on_host
from ..core.plan.plan import Plan
from ..core.trace.trace import LinkTrack
from ..core.validation.host_memory import arenas_of, host_arenas
from .network import Direction, FlowTimes
from .tasks import TaskTimes

DIRECTIONS = {Kind.OFFLOAD: "to host", Kind.RELOAD: "from host"}


@frozen
class HostUse:
    """The memory of one host that devices offload to.

    Args:
        devices: those that offload to it.
        limit_bytes: what plans may offload to it; None for no limit.
        arena_bytes: the arenas of its devices, allocated throughout.
        peak_bytes: the most bytes of offloaded tensors at once.
    """

    host: str
    devices: tuple[int, ...]
    limit_bytes: int | None
    arena_bytes: int
    peak_bytes: float


@frozen
class CopyUse:
    """The copies of one device in one direction.

    Args:
        direction: ``to host`` or ``from host``.
        bytes: all together.
        seconds: time in which they ran.
    """

    device: int
    direction: str
    count: int
    bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Mean rate while they ran; 0 for copies that take no time."""
        return self.bytes / self.seconds if self.seconds else 0.0


def host_uses(plan: Plan, cluster: Cluster, timelines: Sequence[Timeline]) -> tuple[HostUse, ...]:
    """The memory of every host that devices offload to, in the order of their first device."""
    return tuple(
        HostUse(
            host.name, tuple(ranks), host.memory_bytes, arena_bytes, most_on_host([timelines[rank] for rank in ranks])
        )
        for host, ranks, arena_bytes in host_arenas(plan, cluster, arenas_of(plan))
    )


def copy_uses(tasks: Sequence[TaskTimes]) -> tuple[CopyUse, ...]:
    """The copies of every device by direction, in the order of devices."""
    found: dict[tuple[int, str], list[TaskTimes]] = {}
    for task in tasks:
        if task.action.kind in DIRECTIONS:
            found.setdefault((task.device, DIRECTIONS[task.action.kind]), []).append(task)
    return tuple(
        CopyUse(*key, len(own), sum(task.bytes for task in own), sum(task.end_s - task.start_s for task in own))
        for key, own in sorted(found.items())
    )


@frozen
class LinkUse:
    """One direction of one link over a step.

    Args:
        src, dst: names of the devices or hubs at its ends.
        bytes: transferred in the step.
        bytes_per_s: bandwidth.
        utilisation: bytes ÷ (bandwidth × step time).
        delay_s: sum of the extra time of transfers and collectives because it was full.
    """

    src: str
    dst: str
    bytes: float
    bytes_per_s: float
    utilisation: float
    delay_s: float = 0.0


def directed_links(cluster: Cluster) -> dict[Direction, float]:
    """Both directions of every link with the bandwidth in bytes/s, in the cluster's order, from a to b first.

    Then the memory of the hosts: written, read.
    """
    return {
        ends: link.rate(from_a)
        for link in (*cluster.links, *cluster.memories.values())
        for from_a, ends in ((True, (link.a, link.b)), (False, (link.b, link.a)))
    }


def link_uses(cluster: Cluster, flows: Sequence[FlowTimes], step_s: float) -> tuple[LinkUse, ...]:
    """Use of every link direction with traffic, in the cluster's order, from a to b first."""
    carried: dict[Direction, float] = {}
    for flow in flows:
        for direction in flow.links:
            carried[direction] = carried.get(direction, 0.0) + flow.bytes
    delays: dict[Direction, float] = {}
    for flow in flows:  # a flow at rate r whose rate alone is R loses 1 − r/R of every second, to the link that is full
        for piece in flow.pieces or ():
            if piece.held_by is not None:
                lost_s = (piece.end_s - piece.start_s) * (1 - piece.rate / flow.bytes_per_s)
                delays[piece.held_by] = delays.get(piece.held_by, 0.0) + lost_s
    return tuple(
        LinkUse(
            *direction,
            carried[direction],
            rate,
            carried[direction] / (rate * step_s) if step_s else 0.0,
            delays.get(direction, 0.0),
        )
        for direction, rate in directed_links(cluster).items()
        if direction in carried
    )


def link_rates(cluster: Cluster, flows: Iterable[FlowTimes]) -> tuple[LinkTrack, ...]:
    """Rate over time of every link direction with traffic, in the cluster's order.

    A link of infinite bandwidth transfers instantly and has no rate: it is omitted.
    """
    changes: dict[Direction, dict[float, list[float]]] = {}
    for flow in flows:
        for piece in flow.all_pieces:
            if piece.end_s > piece.start_s:
                for direction in flow.links:
                    at = changes.setdefault(direction, {})
                    at.setdefault(piece.start_s, []).append(piece.rate)
                    at.setdefault(piece.end_s, []).append(-piece.rate)
    return tuple(
        _link_rate(direction, changes[direction], rate)
        for direction, rate in directed_links(cluster).items()
        if direction in changes and rate != float("inf")
    )


def _link_rate(direction: Direction, changes: Mapping[float, Sequence[float]], limit: float) -> LinkTrack:
    """Sums of the rates of flows in flight. Rounding errors do not accumulate: an idle link has rate 0."""
    times: list[float] = []
    rates: list[float] = []
    running: list[float] = []
    for time in sorted(changes):
        for change in changes[time]:
            if change > 0:
                running.append(change)
        for change in changes[time]:
            if change < 0:
                running.remove(-change)
        rate = min(sum(running), limit)
        if not rates or rate != rates[-1]:
            times.append(time)
            rates.append(rate)
    return LinkTrack(*direction, limit, tuple(times), tuple(rates))
