"""Sums of microbatches' gradients next to a compute order, by hand, and compared with the simulator."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.host_queue import CollectiveQueue
from panpipe.core.plan.gradient_reduction import collectives
from panpipe.core.search.problem.oracle import longest_path
from panpipe.simulators.run import simulate

from ...support.plans import orders, plan_of, scheduled


def queue_of(plan, *seconds):
    """The queue of device 0; sums of a microbatch take this time for each stage, everything else none."""
    return CollectiveQueue(
        plan.device_actions[0],
        collectives(plan, 0),
        lambda action: seconds[action.stage] if action.kind is Kind.SCATTER_GRAD else 0.0,
    )


def test_next_backward_of_a_stage_waits_for_the_sum_of_the_one_before():
    plan = plan_of(orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), (0, 0), data=2)
    queue = queue_of(evolve(plan, shard=("gradients", "none")), 5.0, 5.0)
    assert [queue.ready_s(position) for position in range(7)] == [0.0] * 7
    queue.issue(4, 9.0)  # 1B0: its stage sums once a step
    queue.issue(5, 10.0)
    assert queue.ready_s(6) == 0.0
    assert queue.ready_s(7) == 15.0
    queue.issue(7, 12.0)  # issued while the first sum is running


def test_sums_of_a_device_run_one_after_another():
    plan = plan_of(orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), (0, 0), data=2)
    queue = queue_of(evolve(plan, shard=("gradients",) * 2), 2.0, 5.0)
    queue.issue(4, 1.0)
    queue.issue(5, 2.0)
    assert queue.ready_s(6) == 6.0
    assert queue.ready_s(7) == 8.0


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize("size", [0, 30, 300])
def test_oracle_and_simulator_agree_where_no_links_are_shared(family, size):
    chunks = 2 if family in ("interleaved-1f1b", "zb-v") else 1
    cost = StageCosts(1.0, 1.25, 0.75, optimizer_s=0.5, gradient_bytes=size, parameter_bytes=size)
    # No messages between stages, which would share links with the sums.
    plan = scheduled(
        family, 2, 4, chunks, data=2, costs=[cost] * 2 * chunks, cluster=fully_connected(4, 10**9, 100.0, 0.0), edges=()
    )
    plan = evolve(plan, shard=("gradients",) * len(plan.stages))
    found = longest_path(plan, plan.predicted.costs, plan.predicted.cluster)
    assert found.step_s == pytest.approx(simulate(plan).step_s)
    whole = longest_path(evolve(plan, shard=()), plan.predicted.costs, plan.predicted.cluster)
    assert found.step_s > whole.step_s or size < 300
