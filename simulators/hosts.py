"""How much of each host's memory a step used, and the copies between devices and hosts."""

from collections.abc import Sequence

from attrs import frozen

from ..core.actions import Kind
from ..core.cluster.cluster import Cluster
from ..core.lowering.residency import Timeline, most_on_host
from ..core.plan.plan import Plan
from ..core.validation.host_memory import arenas_of, host_arenas
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
