"""The hosts whose memory a report shows."""

from collections.abc import Sequence

from attrs import frozen

from ..plan.host_arena import host_slots
from ..plan.plan import Plan
from ..trace.trace import HOST_MEMORY, Trace


@frozen
class Host:
    """A host that devices offload to.

    Args:
        name: its name.
        devices: those that offload to it.
        limit_bytes: what plans may offload to it; None for no limit.
        arena_bytes: the arenas of its devices; None without a plan.
    """

    name: str
    devices: tuple[int, ...]
    limit_bytes: int | None = None
    arena_bytes: int | None = None


def hosts_of(plan: Plan | None, traces: Sequence[Trace]) -> tuple[Host, ...]:
    """The hosts of all devices that offload, in the order of their first device.

    Which devices share a host is only known from a plan with a cluster; otherwise each device has a host of its own.
    """
    devices = sorted({sample.device for trace in traces for sample in trace.memory if sample.kind == HOST_MEMORY})
    if not devices or plan is None or plan.prediction is None:
        return tuple(Host(f"host of device {device}", (device,)) for device in devices)
    cluster = plan.mesh.arrange(plan.prediction.cluster)
    found: dict[str, list[int]] = {}
    for device in devices:
        found.setdefault(cluster.host_of(device).name, []).append(device)
    return tuple(
        Host(
            name,
            tuple(ranks),
            cluster.host_of(ranks[0]).memory_bytes,
            sum(host_slots(plan, rank % plan.devices).bytes for rank in ranks),
        )
        for name, ranks in found.items()
    )
