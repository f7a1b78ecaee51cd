"""What an optimizer step waits for, by hand."""

import pytest
from attrs import evolve
from panpipe.answers.step_tables import idle_of
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.validation.validate import check_actions
from panpipe.simulators.optimizer_step import OptimizerStep
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of

HOP_S, STEP_S = 0.5, 0.25
COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=STEP_S)
# Device 2: F 3–4, B 4–6. Device 1: F 1.5–2.5, B 6.5–8.5. Device 0: F 0–1, B 9–11.
PLAN = plan_of(
    orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
    (0, 1, 2),
    costs=[COST] * 3,
    cluster=fully_connected(3, 10**6, float("inf"), HOP_S),
)
COMPUTED_S = (11.0, 8.5, 6.0)


def step_starts(mode: OptimizerStep, plan=PLAN) -> tuple[float, ...]:
    return tuple(starts[-1] for starts, _ in simulate(plan, optimizer=mode).operation_times)


def test_without_sync_each_device_steps_after_its_own_gradients():
    assert step_starts(OptimizerStep.LOCAL) == COMPUTED_S
    assert simulate(PLAN).step_s == 11.25


def test_a_barrier_ends_with_the_slowest_and_an_all_reduce():
    assert step_starts(OptimizerStep.BARRIER) == (12.0,) * 3
    result = simulate(PLAN, optimizer=OptimizerStep.BARRIER)
    assert [bubbles["optimizer"] for bubbles in result.bubbles] == [1.0, 3.5, 6.0]
    assert result.step_s == result.stage_span_s == 12.25


def test_post_validation_passes_from_device_to_device():
    assert step_starts(OptimizerStep.POST_VALIDATION) == (11.0, 11.5, 12.0)


def test_post_validation_costs_nothing_where_the_first_device_ends_first():
    # Two stages, the model's first on the last device: what is passed on is there before it is needed.
    plan = plan_of(orders("1F0 1B0", "0F0 0B0"), (1, 0), costs=[COST] * 2)
    assert step_starts(OptimizerStep.POST_VALIDATION, plan) == step_starts(OptimizerStep.LOCAL, plan)


def test_a_tied_weight_is_summed_first():
    plan = evolve(PLAN, tied=(TiedWeight("embedding", (0, 2), 20),))
    result = simulate(plan, optimizer=OptimizerStep.BARRIER)
    # The sum ends at 11.5 on devices 0 and 2, the barrier a second later on all.
    assert result.step_s == 12.75
    assert result.bubbles[2]["reduction"] == 5.5
    assert result.bubbles[2]["optimizer"] == 1.0
    for bubbles, busy in zip(result.bubbles, result.busy_s, strict=True):
        assert sum(bubbles.values()) + busy + STEP_S == pytest.approx(result.step_s)


def test_one_device_steps_without_waiting():
    plan = plan_of(orders("0F0 0B0"), (0,), costs=[COST])
    for mode in OptimizerStep:
        assert simulate(plan, optimizer=mode).step_s == 3.25


@pytest.mark.parametrize("plan", [PLAN, evolve(PLAN, sync=True)], ids=["local", "sync"])
def test_what_differs_from_the_plan_changes_its_times_alone(plan):
    for mode in OptimizerStep:
        found = simulate(plan, optimizer=mode)
        given = simulate(plan, optimizer=mode, lowered=lower(plan))
        checked = simulate(plan, optimizer=mode, checked=check_actions(plan))
        assert found.operation_times == given.operation_times == checked.operation_times
        assert (found.plan, idle_of(found).step_s) == (plan, found.step_s)


def test_an_option_that_is_none_of_them_is_refused():
    with pytest.raises(RequestError, match="optimizer is 'barrier': give an OptimizerStep of"):
        simulate(PLAN, optimizer="barrier")


def test_a_message_of_post_validation_does_not_wait_for_gathers_after_the_step():
    # Gradients of device 0 are there at 11.5 (9, and a reduction of half the time), the message 1.3 s later.
    costs = [evolve(COST, gradient_bytes=40, parameter_bytes=40)] * 2
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2, costs=costs, cluster=fully_connected(4, 10**6, 10.0, HOP_S)
    )
    sharded = evolve(plan, shard=("optimizer",) * 2)
    assert step_starts(OptimizerStep.POST_VALIDATION, sharded) == pytest.approx((11.5, 12.8) * 2)
