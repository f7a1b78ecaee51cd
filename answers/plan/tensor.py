"""``--tp``: tensor ranks that share each stage."""

from collections.abc import Sequence

from attrs import evolve

from ...core.cluster.catalog.find import CPU
from ...core.cluster.cluster import Cluster
from ...core.cluster.mesh import plain
from ...core.cluster.tensor_groups import GroupedCluster, consecutive_groups
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ..bundled_models import is_bundled, shared_sizes

AUTO = "auto"


def wanted_tensor(tp: str | None, machine: Cluster, cluster: str, model: str | None, others: int = 1) -> Sequence[int]:
    """The numbers of tensor ranks to choose among.

    Args:
        tp: the option: None, ``auto`` or a number.
        machine: the devices.
        cluster: the cluster's name on the command line.
        model: ``module:factory`` or a bundled model's name; None for an operator-graph file.
        others: number of context and expert ranks for each tensor rank.

    Raises:
        RequestError: the option is none of these, the model or the cluster cannot be split, or the number of devices is
            no multiple of the number of ranks.
    """
    if tp is None or tp == "1":
        return [1]
    if tp != AUTO and not (tp.isdecimal() and int(tp) >= 1):
        raise RequestError(f"--tp is '{tp}': give a whole number of at least 1, or auto")
    if model is None:
        raise RequestError(
            "--tp splits a model's layers, and --graph gives operators with their costs alone: leave --tp out"
        )
    if not is_bundled(model) and tp == AUTO:
        raise RequestError(f"--tp auto is for bundled models: give the number of tensor ranks of '{model}'")
    if CPU.fullmatch(cluster):
        raise RequestError(f"--tp plans for described devices, and '{cluster}' is this host: name a cluster")
    if tp != AUTO:
        consecutive_groups(machine, int(tp) * others)
        return [int(tp)]
    sizes = shared_sizes(model).values()
    return [
        count for count in (1, 2, 4, 8, 16)
        if len(machine.devices) % (count * others) == 0 and all(size % count == 0 for size in sizes)
        and _near(machine, count)
    ]  # fmt: skip


def _near(machine: Cluster, count: int) -> bool:
    """Whether all devices are equal, and messages between the first ``count`` as fast as between the first two."""
    first = machine.devices[0]
    if any((other.type, other.memory_bytes) != (first.type, first.memory_bytes) for other in machine.devices):
        return count == 1
    distances = [machine.transfer_s(0, other, 1e6) for other in range(1, count)]
    return all(distance <= distances[0] * 1.01 for distance in distances)


def with_tensor_ranks(plan: Plan, machine: Cluster) -> Plan:
    """A plan for groups of tensor ranks as a plan for their devices; unchanged if the machine has single devices."""
    if not isinstance(machine, GroupedCluster):
        return plan
    groups = [[machine.groups[device] for device in replica] for replica in plan.mesh.replicas]
    devices = tuple(tuple(device for group in replica for device in group) for replica in groups)
    mesh = plain(
        evolve(plan.mesh, devices=devices, tensor=machine.tensor, context=machine.context, experts=machine.experts)
    )
    return evolve(plan, mesh=mesh, prediction=evolve(plan.predicted, cluster=machine.single))
