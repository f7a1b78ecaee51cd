"""Offload of plans, for a request of the user, and of schedules of abstract stages."""

from collections.abc import Sequence
from math import floor

from attrs import evolve

from ..actions import Action
from ..cluster.catalog.find import device_type
from ..cluster.cluster import Cluster
from ..costs.costs import StageCosts
from ..costs.graph import OpGraph
from ..errors import RequestError
from ..plan.memory_policy import StageOffload, Storage, TimedCopy
from ..plan.plan import Plan
from ..timing.coding import INFINITY
from ..timing.orders import latest_times
from .choice import Offloadable, Picks, choose_offload, everything, of_stages
from .host_links import HostLink, host_links, same_links, timed_copies
from .request import OffloadRequest, check_offload_request


def offloadable(
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    storages: Sequence[Sequence[Storage]],
) -> Offloadable:
    """A plan's orders with their times without copies, for the choice of what is offloaded.

    Args:
        cluster: the cluster, with its devices in their own order.
        storages: per stage those that may be offloaded (``core/offload/storages``).
    """
    machine = plan.mesh.arrange(cluster)
    recompute = plan.memory.recompute
    times = latest_times(
        plan.device_actions, plan.placement, costs, edges=plan.edges, hop_s=machine.transfer_s, recompute=recompute
    )
    return Offloadable(
        plan.device_actions, times, costs, storages, host_links(plan, machine), recompute,
        plan.memory.host_copy_queues, _host_limits(plan, machine),
    )  # fmt: skip


def with_offload(plan: Plan, task: Offloadable, pick: Picks) -> Plan:
    """The plan with offload, without its prediction; the same plan if nothing is offloaded.

    Args:
        task: see :func:`offloadable` and :func:`choose_offload`.
    """
    offload = choose_offload(task, pick)
    if offload == plan.memory.offload:
        return plan
    return evolve(plan, memory=evolve(plan.memory, offload=offload), prediction=None)


def picks_of(wanted: OffloadRequest, stages: int) -> Picks:
    """What each device offloads for a request other than ``auto``, which needs memory limits.

    Raises:
        RequestError: see :func:`check_offload_request`.
    """
    check_offload_request(wanted, stages)
    if wanted == "all":
        return everything
    assert not isinstance(wanted, str) or wanted == "none"
    return of_stages({} if isinstance(wanted, str) else wanted)


def copy_queues(plan: Plan, cluster: Cluster) -> int:
    """Host-copy queues of a plan's devices: the smallest number of their types; 1 if that of a type is not known."""
    types = [device_type(cluster, device) for device in plan.mesh.cluster_devices]
    return min((1 if kind is None else kind.host_copy_queues or 1 for kind in types), default=1)


def _host_limits(plan: Plan, machine: Cluster) -> list[float] | None:
    """Per device an equal share of the memory of its host; None where no host has a limit."""
    limits = {hub.name: hub.memory_bytes for hub in machine.hubs if hub.memory_bytes is not None}
    if not limits:
        return None
    hosts = [_host(machine, rank) for rank in range(plan.mesh.ranks)]
    shares = [limits.get(name, INFINITY) / hosts.count(name) for name in hosts]
    return [min(shares[device :: plan.devices]) for device in range(plan.devices)]


def _host(machine: Cluster, rank: int) -> str:
    """The host of a rank's device; empty where it reaches none."""
    try:
        return machine.host_of(rank).name
    except RequestError:
        return ""


SMALLEST_BYTES = 1_000_000
"""Smaller storages stay on the device: a copy of its own costs more than they free."""


def graph_storages(
    graph: OpGraph, stages: Sequence[Sequence[str]], costs: Sequence[StageCosts]
) -> tuple[tuple[Storage, ...], ...]:
    """Per stage its storages that may be offloaded, in the graph's order: one for each operator that saves enough.

    Args:
        graph: operators with their saved bytes for one microbatch.
        costs: of the stages; if measured, they may save less than their operators do alone.
    """
    result = []
    for names, cost in zip(stages, costs, strict=True):
        nodes = [graph.nodes[graph.index[name]] for name in names]
        total = sum(node.saved_bytes for node in nodes)
        scale = min(cost.saved_bytes / total, 1.0) if total else 1.0
        sizes = ((node.name, floor(scale * node.saved_bytes)) for node in nodes)
        result.append(tuple(Storage(name, size) for name, size in sizes if size >= SMALLEST_BYTES))
    return tuple(result)


FREE_S_PER_BYTE = 1e-15
"""Seconds per byte of a copy that takes no time."""


def schedule_copies(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    offload: Sequence[tuple[int, float]],
    costs: Sequence[StageCosts],
    hop_s: float,
    copy_s_per_byte: float,
) -> tuple[tuple[StageOffload, ...], list[list[TimedCopy]]]:
    """What each stage of a schedule of abstract stages offloads, and per device its copies.

    Args:
        orders, placement: of the schedule; a stage saves one storage, and no two devices share a link.
        offload: stages with the share of their saved tensors that is offloaded.
        copy_s_per_byte: time of a copy in either direction, per byte.
    """
    rate = 1 / max(copy_s_per_byte, FREE_S_PER_BYTE)
    links = same_links(len(orders), HostLink(rate, rate))
    storages = [(Storage("saved tensors", round(cost.saved_bytes)),) for cost in costs]
    task = Offloadable(orders, latest_times(orders, placement, costs, hop_s=hop_s), costs, storages, links)
    chosen = choose_offload(task, of_stages(dict(offload)))
    return chosen, timed_copies(orders, placement, chosen, links)
