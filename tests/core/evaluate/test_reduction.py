"""The end of a step by hand: reductions one after another, optimizer steps, and the sync of all stages."""

from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.collectives import collective_s
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reduction import reduction_time, step_ends, sync_bytes, sync_time
from panpipe.core.plan.plan import Stage

from ...support.plans import orders, plan_of

COSTS = [
    StageCosts(1.0, 1.0, 1.0, optimizer_s=seconds, gradient_bytes=size) for seconds, size in ((0.5, 80), (0.25, 0))
]
PLAN = plan_of(orders("0F0 1F0 1I0 1W0 0B0"), (0, 0))
ENDS = [[[1.0, 2.0, 3.0, 4.0, 6.0]]]


def test_device_steps_its_stages_in_order_after_its_compute():
    assert step_ends(PLAN, COSTS, ENDS, lambda stage: 100.0) == [6.75]  # one replica reduces nothing


def test_reductions_run_one_after_another_from_the_last_backward_of_each_stage():
    two = evolve(PLAN, mesh=evolve(PLAN.mesh, data=2))
    # Stage 1 from 4 s (its W, in the slower replica at 4.5) for 3 s, stage 0 from 7.5 s for 1 s.
    later = [[[1.0, 2.0, 3.0, 4.5, 6.0]]]
    assert step_ends(two, COSTS, ENDS + later, [1.0, 3.0].__getitem__) == [8.5 + 0.5 + 0.25]
    # Stage 0's own reduction begins when its backward has ended.
    assert step_ends(two, COSTS, ENDS * 2, [1.0, 0.5].__getitem__) == [7.75]


def test_steps_of_a_plan_with_a_sync_begin_together():
    plan = evolve(plan_of(orders("0F0 0B0", "1F0 1B0", ""), (0, 1)), sync=True)
    ends = [[[1.0, 9.0], [2.0, 4.0], []]]
    assert step_ends(plan, COSTS, ends, lambda stage: 0.0, sync_s=2.0) == [11.5, 11.25, 0.0]
    assert step_ends(evolve(plan, sync=False), COSTS, ends, lambda stage: 0.0, sync_s=2.0) == [9.5, 4.25, 0.0]


def test_sync_takes_the_slowest_transfer_there_and_back():
    plan = evolve(PLAN, stages=(Stage(0, 0, ("a",), ("w", "v")), Stage(1, 0, ("b",), ("w",))))
    assert (sync_bytes(PLAN), sync_bytes(plan)) == (16, 32)
    cluster = fully_connected(3, 100, 8.0, 0.5)
    assert sync_time(plan, cluster, [0, 1, 2]) == 2 * (0.5 + 32 / 8.0)
    assert sync_time(plan, cluster, [1]) == 0.0


def test_reduction_takes_the_time_of_its_collective_over_the_replicas_of_the_stage():
    cluster = fully_connected(4, 100, 8.0, 0.5)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2)
    seconds = reduction_time(plan, COSTS, cluster)
    assert seconds(0) == collective_s(cluster, [0, 2], 80) > 0.5
    assert seconds(1) == 0.0  # it has no gradients
