"""Symmetric replicas: one of them is simulated, and the others have its times.

The replicas of a plan run the same orders with the same costs. They have the same times if their messages cross links
of their own, as fast as those of the first replica, link by link, and if what joins all replicas (the sums of gradients
and SYNC) crosses none of these links::

    replica 0   gpu0 ── nvlink ── gpu1          messages: links of the replica alone
                  │                 │
                 nic               nic          sums: links that no message crosses
                  │                 │
    replica 1   gpu2 ── nvlink ── gpu3

Then the events of each replica are those of the first, at the same times, so the first one runs with the tasks that
join all of them. Replicas that share links, or whose messages share links with the sums, are not symmetric: all of them
are simulated. So are replicas with tied weights or host copies, which are tasks of one replica, and replicas in which
a transfer contends or waits for another one: then the network's events follow from all flows together, and the times of
a replica alone would differ in their last bits.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ..core.cluster.cluster import Cluster
from ..core.cluster.routing import Hop, path_latency_s
from ..core.costs.costs import StageCosts
from ..core.lowering.queues import Queues
from ..core.plan.items import Task
from ..core.plan.kinds import movement, task_kinds
from ..core.plan.plan import Plan
from .channels import QueueTimes
from .network.flows import Direction

if TYPE_CHECKING:
    from .result import SimulationResult

Links = Mapping[Direction, Direction]
"""Directed links of the first replica → those of another one."""


@frozen
class Symmetry:
    """Symmetric replicas.

    Args:
        joined: the tasks of one replica, in order, with the items of all replicas.
        links: per replica its links.
    """

    joined: tuple[Task, ...]
    links: tuple[Links, ...]

    def of_all(self, one: "SimulationResult", queues: Queues) -> "SimulationResult":
        """The result of all replicas from that of the first one."""
        replicas, count = range(len(self.links)), len(one.operation_times)
        queue_times = {
            (replica * count + src, replica * count + dst): _queue_of(times, self.links[replica])
            for replica in replicas
            for (src, dst), times in one.queue_times.items()
        }
        tasks = tuple(evolve(task, device=replica * count + task.device) for replica in replicas for task in one.tasks)
        return evolve(
            one, queues=queues, operation_times=one.operation_times * len(replicas), queue_times=queue_times,
            tasks=tasks,
        )  # fmt: skip


def find_symmetry(
    plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, one: Queues, queues: Queues
) -> Symmetry | None:
    """The symmetry of a plan's replicas; None if they have to be simulated together."""
    kinds = task_kinds()
    if any(not kinds[task.kind].joins_replicas for task in one.tasks):
        return None
    if any(cost.reductions is not None for cost in costs):
        return None
    taken: set[Direction] = set()
    for task in queues.tasks:
        for step in movement(task, plan, costs, cluster).steps:
            taken |= {_ends(hop) for phase in step for hop in phase.crossings}
    found: list[Links] = []
    for first in range(0, plan.mesh.data * plan.devices, plan.devices):
        links: dict[Direction, Direction] = {}
        own: set[Direction] = set()
        for src, dst in one.messages:
            path, other = cluster.path(src, dst), cluster.path(first + src, first + dst)
            if not _alike(path, other):
                return None
            for here, there in zip(path, other, strict=True):
                if links.setdefault(_ends(here), _ends(there)) != _ends(there):
                    return None
                own.add(_ends(there))
        if len(own) < len(links) or own & taken:
            return None
        taken |= own
        found.append({**links, **{ends[::-1]: there[::-1] for ends, there in links.items()}})
    return Symmetry(queues.tasks, tuple(found))


def _ends(hop: Hop) -> Direction:
    return hop[0].a, hop[0].b


def _alike(path: Sequence[Hop], other: Sequence[Hop]) -> bool:
    """Whether two paths have the same latency, and link by link the same rates and directions."""
    return (
        len(path) == len(other)
        and path_latency_s(path) == path_latency_s(other)
        and all(
            from_a == from_b
            and (a.rate(True), a.rate(False), a.both_bytes_per_s) == (b.rate(True), b.rate(False), b.both_bytes_per_s)
            for (a, from_a), (b, from_b) in zip(path, other, strict=True)
        )
    )


def _queue_of(times: QueueTimes, links: Links) -> QueueTimes:
    """The times over other links; no flow contends."""
    return evolve(times, flows=[flow._replace(links=tuple(links[each] for each in flow.links)) for flow in times.flows])
