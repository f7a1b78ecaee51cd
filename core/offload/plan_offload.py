"""Add offload to a plan's memory policy, for a request of the user."""

from collections.abc import Sequence

from attrs import evolve

from ..cluster.catalog.find import device_type
from ..cluster.cluster import Cluster
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..plan.memory_policy import Storage
from ..plan.plan import Plan
from ..timing.coding import INFINITY
from ..timing.orders import latest_times
from .choice import Offloadable, Picks, choose_offload, everything, of_stages
from .host_links import HostLinks, host_links
from .request import OffloadRequest, check_offload_request


def offloadable(
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    storages: Sequence[Sequence[Storage]],
    links: HostLinks | None = None,
) -> Offloadable:
    """A plan's orders with their times without copies, for the choice of what is offloaded.

    Args:
        plan: its orders, and its stages that recompute.
        costs: per stage.
        cluster: the cluster, with its devices in their own order.
        storages: per stage those that may be offloaded (``core/offload/storages``).
        links: between devices and hosts, if known.
    """
    machine = plan.mesh.arrange(cluster)
    recompute = plan.memory.recompute
    times = latest_times(
        plan.device_actions, plan.placement, costs, edges=plan.edges, hop_s=machine.transfer_s, recompute=recompute
    )
    return Offloadable(
        plan.device_actions, times, costs, storages, links or host_links(plan, machine), recompute,
        plan.memory.host_copy_queues, _host_limits(plan, machine),
    )  # fmt: skip


def with_offload(plan: Plan, task: Offloadable, pick: Picks) -> Plan:
    """The plan with offload, without its prediction; the same plan if nothing is offloaded.

    Args:
        plan: a plan.
        task: see :func:`offloadable` and :func:`choose_offload`.
        pick: chooses what each device offloads.
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
