"""What collectives move: SYNC of all stages, and the reduction of a stage's gradients."""

from attrs import evolve
from panpipe.core.actions import Action, Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.collectives import collective_s
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.items import Item, Task
from panpipe.core.plan.kinds import movement
from panpipe.core.plan.plan import Stage

from ...support.plans import orders, plan_of

COSTS = [StageCosts(1.0, 1.0, 1.0, gradient_bytes=size) for size in (80, 0)]


def alone_s(plan, kind, cluster, stage=0):
    task = Task(kind, "", "", (Item(plan.placement[stage], "", Action(stage, kind), 0, 0),), ())
    return movement(task, plan, COSTS, cluster).alone_s


def test_sync_takes_the_slowest_transfer_there_and_back():
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
    plan = evolve(plan, stages=(Stage(0, 0, ("a",), ("w", "v")), Stage(1, 1, ("b",), ("w",))))
    cluster = fully_connected(2, 100, 8.0, 0.5)
    assert alone_s(plan, Kind.SYNC, cluster) == 2 * (0.5 + 32 / 8.0)
    assert alone_s(plan_of(orders("0F0 0B0"), (0,)), Kind.SYNC, cluster) == 0.0


def test_reduction_takes_the_time_of_its_collective_over_the_replicas_of_the_stage():
    cluster = fully_connected(4, 100, 8.0, 0.5)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2)
    assert alone_s(plan, Kind.REDUCE_GRAD, cluster) == collective_s(cluster, [0, 2], 80) > 0.5
    assert alone_s(plan, Kind.REDUCE_GRAD, cluster, 1) == 0.0  # it has no gradients
