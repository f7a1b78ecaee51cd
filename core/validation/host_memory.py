"""Whether the host arenas of a plan fit the memory of the hosts that devices share."""

from collections.abc import Sequence

from attrs import evolve

from ..cluster.cluster import Cluster, Hub
from ..errors import InfeasibleError
from ..plan.plan import Plan
from ..policies.offload import host_slots


def check_host_memory(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """Compare the arenas of all devices of a host with its memory.

    Args:
        cluster: its devices in the order of ranks; a host without ``memory_bytes`` has no limit.

    Returns:
        Bytes of the host arena of each device along the pipeline.

    Raises:
        InfeasibleError: a host has too little; the message says by how much, and what would fit.
        RequestError: a device that offloads reaches no host.
    """
    arenas = arenas_of(plan)
    for host, ranks, needed in host_arenas(plan, cluster, arenas):
        if host.memory_bytes is not None and needed > host.memory_bytes:
            over = needed - host.memory_bytes
            users = f"device{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            raise InfeasibleError(
                f"host '{host.name}' holds {needed} bytes of offloaded tensors of {users} and has {host.memory_bytes}: "
                f"{over} too many; give it {over} bytes more, or {_what_fits(plan, ranks, host.memory_bytes)}"
            )
    return arenas


def arenas_of(plan: Plan) -> tuple[int, ...]:
    """Bytes of the host arena of each device along the pipeline."""
    return tuple(host_slots(plan, device).bytes for device in range(plan.devices))


def host_arenas(plan: Plan, cluster: Cluster, arenas: Sequence[int]) -> list[tuple[Hub, list[int], int]]:
    """The hosts that devices offload to, in the order of their first rank, each with its ranks and the bytes of their
    arenas.

    Args:
        arenas: of the plan, by `arenas_of`.

    Raises:
        RequestError: a device that offloads reaches no host.
    """
    offloads = {plan.placement[each.stage] for each in plan.memory.offload}
    found: dict[Hub, list[int]] = {}
    for rank in range(plan.mesh.ranks):
        if rank % plan.devices in offloads:
            found.setdefault(cluster.host_of(rank), []).append(rank)
    return [(host, ranks, sum(arenas[rank % plan.devices] for rank in ranks)) for host, ranks in found.items()]


def _what_fits(plan: Plan, ranks: Sequence[int], limit: float) -> str:
    """Stages of these ranks that should not be offloaded, so that the arenas of the others fit.

    Stages with few bytes are added until the rest fits; then those are removed again that are not needed.
    """
    devices = {rank % plan.devices for rank in ranks}
    here = [each for each in plan.memory.offload if plan.placement[each.stage] in devices]

    def needed(kept: Sequence[int]) -> int:
        left = tuple(other for other in plan.memory.offload if other.stage not in kept)
        arenas = arenas_of(evolve(plan, memory=evolve(plan.memory, offload=left)))
        return sum(arenas[rank % plan.devices] for rank in ranks)

    kept: list[int] = []
    for each in sorted(here, key=lambda each: (each.bytes * len(each.copies), each.stage)):
        kept.append(each.stage)
        if needed(kept) <= limit:
            break
    for stage in kept[:-1]:
        without = [other for other in kept if other != stage]
        kept = without if needed(without) <= limit else kept
    rest = f"the others need {needed(kept)}" if needed(kept) else "nothing else is offloaded then"
    return f"keep stage{'s' if len(kept) > 1 else ''} {', '.join(map(str, sorted(kept)))} on the device ({rest})"
