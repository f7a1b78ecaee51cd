"""Plans of forwards alone: their orders, what they send and hold, and what they may not have."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only, forward_order
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import TiedWeight, parse_plan, plan_json
from panpipe.core.schedules.registry import BUILT_IN
from panpipe.core.validation.backpressure import choose_ahead_limit
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.plans import UNIT, orders, scheduled

NAMES = [family.name for family in BUILT_IN if family.name != "building-block"]


def plan_of_name(name, data=1):
    for chunks in (2, 1):
        try:
            return scheduled(name, 4, 8, chunks, data=data)
        except RequestError:
            continue
    raise AssertionError(name)


def test_forward_order_of_a_folded_placement():
    edges = [StageEdge(i, i + 1, 1, 0) for i in range(3)]
    found = forward_order((0, 1, 1, 0), edges, 2, 3)
    assert found == orders("0F0 0F1 0F2 3F0 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2")


def test_a_device_without_a_stage_has_an_empty_order():
    assert forward_order((0, 2), [StageEdge(0, 1, 1, 0)], 3, 1) == (*orders("0F0"), (), *orders("1F0"))


@pytest.mark.parametrize("name", NAMES)
def test_forwards_of_every_schedule_run_to_the_end_and_hold_nothing(name):
    plan = forward_only(plan_of_name(name, data=2))
    validate(plan)
    lowered = lower(plan)
    assert {a.kind for actions in lowered for a in actions} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert choose_ahead_limit(plan, lowered)(0, 1) == 2
    stages = len(plan.stages)
    result = simulate(plan, [UNIT] * stages, fully_connected(8, 10**9, float("inf"), 0.0))
    # Nobody waits but for the first microbatch to come and, in a V, the last one to go back.
    assert result.step_s <= 8 * stages / 4 + 2 * 3
    assert set(result.peak_saved_bytes) == {0.0}
    assert max(kinds["communication"] for kinds in result.peak_by_kind) <= 60  # of messages of 10 bytes
    validate(first_microbatches(plan, 3))
    assert parse_plan(plan_json(plan), "the plan") == plan


def test_backward_actions_in_a_forward_plan_are_refused():
    trained = scheduled("1f1b", 2, 2)
    plan = forward_only(trained)
    for wrong, said in (
        (evolve(plan, sync=True), "forward only and has sync"),
        (evolve(plan, tied=(TiedWeight("w", (0, 1), 4),)), "forward only and has tied: w"),
        (evolve(plan, edges=trained.edges), "has edges with gradients: 0 → 1"),
        (evolve(plan, device_actions=trained.device_actions), "stage 0 has B for microbatch 0 .* forward only"),
    ):
        with pytest.raises(RequestError, match=said):
            validate(wrong)
