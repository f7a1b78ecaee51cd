"""What a step's plan and order become for the messages of its microbatches."""

import pytest
import torch
from panpipe.core.actions import Kind
from panpipe.core.capture.programs.stage import Boundary
from panpipe.core.plan.derive import forward_only
from panpipe.core.plan.lowering import lower
from panpipe.runtimes.engine.prepared import messages_of, order_of, parts_of
from panpipe.runtimes.engine.results import Computed

from ...support.plans import orders, plan_of
from ...support.two_stages import TwoStages

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


def tensor(gradient: bool = True, rows: int = 2) -> Boundary:
    return Boundary("x", (rows, 3), torch.float32, gradient)


def texts(rows):
    return [" ".join(map(str, row)) for row in rows]


def test_messages_of_a_layout_are_its_pairs_and_whether_any_gradient_comes_back():
    layout = {(0, 1): (tensor(False), tensor(True)), (0, 2): (tensor(False),)}
    assert messages_of(layout) == {(0, 1, True), (0, 2, False)}


def test_order_of_all_messages_is_that_of_the_plan():
    found = order_of(PLAN, [{(0, 1): (tensor(),)}] * 2)
    assert texts(found.lowered) == texts(lower(PLAN))
    assert found.plan is PLAN
    assert found.ahead_limit is None


def test_order_leaves_out_both_ends_of_what_a_microbatch_does_not_send():
    found = order_of(PLAN, [{(0, 1): (tensor(),)}, {(0, 1): (tensor(False),)}])
    assert texts(found.lowered) == [
        "0RECV_B0<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0B0 0B1 0STEP",
        "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1STEP",
    ]
    found = order_of(PLAN, [{(0, 1): (tensor(),)}, {}])
    assert texts(found.lowered) == [
        "0RECV_B0<1 0F0 0SEND_F0>1 0F1 0B0 0B1 0STEP",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1STEP",
    ]


def test_order_of_fewer_microbatches_is_that_of_the_first():
    found = order_of(PLAN, [{(0, 1): (tensor(),)}])
    assert found.plan.microbatches == 1
    assert texts(found.lowered) == ["0RECV_B0<1 0F0 0SEND_F0>1 0B0 0STEP", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP"]


def test_order_counts_the_largest_of_different_messages_that_the_plan_does_not_have():
    without = plan_of(PLAN.device_actions, (0, 1), edges=[])
    found = order_of(without, [{(0, 1): (tensor(rows=2),)}, {(0, 1): (tensor(rows=1), tensor(False, rows=5))}])
    assert [(e.bytes, e.gradient_bytes) for e in found.plan.edges] == [(72, 24)]


def test_order_of_forwards_alone_knows_how_far_stages_may_run_ahead():
    found = order_of(forward_only(PLAN), [{(0, 1): (tensor(False),)}] * 2)
    assert found.ahead_limit is not None
    assert {action.kind for row in found.lowered for action in row} == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_replicas_with_other_numbers_of_microbatches_reduce_in_the_order_of_the_whole_plan():
    plan = plan_of(orders("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"), (0, 0), data=2)
    layout = {(0, 1): (tensor(),)}
    reductions = [
        [str(action) for action in row if action.kind is Kind.REDUCE_GRAD]
        for row in (order_of(plan, [layout]).lowered[0], order_of(plan, [layout] * 2).lowered[0])
    ]
    assert reductions == [["1REDUCE_GRAD", "0REDUCE_GRAD"]] * 2
    few = [str(action) for action in order_of(plan, [layout]).lowered[0]]
    assert few.index("1REDUCE_GRAD") > few.index("0B0")


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_parts_name_the_device_of_the_stage_that_computes_them(place):
    compiled = TwoStages().compiled
    name = compiled.operators.step.outputs.home
    assert parts_of(compiled, place) == [Computed(name, place[1]), None]
