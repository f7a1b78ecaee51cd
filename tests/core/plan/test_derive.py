"""Derived plans: the first microbatches of any schedule are a sound plan; other messages are one, or are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import Kind
from panpipe.core.costs.costs import StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, with_edges
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import BUILT_IN
from panpipe.core.validation.validate import validate

from ...support.early_gradients import early_gradients
from ...support.plans import orders, plan_of, plans, scheduled

FAMILIES = tuple(family for family in BUILT_IN if family.name != "building-block")  # that one needs a block


def texts(plan):
    return tuple(" ".join(map(str, actions)) for actions in plan.device_actions)


def test_first_microbatches_of_1f1b():
    plan = scheduled("1f1b", 2, 4)
    assert texts(plan)[0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert texts(first_microbatches(plan, 2)) == ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert first_microbatches(plan, 4) is plan
    for count in (0, 5):
        with pytest.raises(RequestError, match=f"the number of microbatches is {count}, and the plan is for 4"):
            first_microbatches(plan, count)


@given(st.sampled_from(FAMILIES), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.data())
def test_every_schedule_is_valid_for_its_first_microbatches(family, devices, microbatches, chunks, data):
    chunks = family.chunks[0] if family.chunks else chunks
    schedule = family.build(ScheduleProblem(devices, microbatches, chunks))
    actions = schedule.device_actions
    if data.draw(st.booleans()):
        actions = early_gradients(actions, schedule.placement, 2)
    stages = len(schedule.placement)
    far = [StageEdge(0, stages - 1, 5, data.draw(st.sampled_from([0, 5])))] if stages > 2 else []
    plan = plan_of(actions, schedule.placement, edges=[*(StageEdge(i, i + 1, 9, 9) for i in range(stages - 1)), *far])
    count = data.draw(st.integers(1, microbatches))
    left = first_microbatches(plan, count)
    warnings = validate(left).warnings
    assert len(warnings) <= len(validate(plan).warnings)
    for before, after in zip(plan.device_actions, left.device_actions, strict=True):
        assert after == tuple(action for action in before if action.microbatch < count)


@given(plans(), st.data())
def test_any_plan_is_valid_for_its_first_microbatches(plan, data):
    validate(first_microbatches(plan, data.draw(st.integers(1, plan.microbatches))))


def test_with_edges_returns_the_same_plan_unless_an_edge_is_new():
    plan = scheduled("1f1b", 3, 2)
    assert with_edges(plan, [StageEdge(1, 2, 99, 99), StageEdge(0, 1, 1, 1)]) is plan  # the same stages talk
    skipping = with_edges(plan, [*plan.edges, StageEdge(0, 2, 4, 0)])
    assert [(e.src, e.dst) for e in skipping.edges] == [(0, 1), (0, 2), (1, 2)]
    assert skipping.hash != plan.hash
    validate(skipping)


def test_edges_against_the_order_are_a_deadlock():
    side_by_side = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), edges=[])
    validate(side_by_side)
    validate(with_edges(side_by_side, [StageEdge(0, 1, 4, 4)]))
    backwards = plan_of(orders("1F0 0F0 0B0 1B0"), (0, 0), edges=[])
    validate(backwards)
    with pytest.raises(RequestError, match="1F0"):
        validate(with_edges(backwards, [StageEdge(0, 1, 4, 4)]))
    assert {a.kind for actions in backwards.device_actions for a in actions} == {Kind.F, Kind.B}
