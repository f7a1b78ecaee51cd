"""Lowering: literal tables, queue order, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Kind
from panpipe.core.costs.costs import StageEdge
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import TiedWeight

from ...support.plans import orders, plan_of, plans

TWO_STAGES = {
    0: (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0STEP",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1STEP",
    ),
    1: (
        "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0RECV_B1<1 0B0 0B1 0STEP",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP",
    ),
    2: (
        "0RECV_B0<1 0F0 0SEND_F0>1 0RECV_B1<1 0F1 0SEND_F1>1 0B0 0B1 0STEP",
        "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1STEP",
    ),
}


def texts(lowered):
    return tuple(" ".join(map(str, actions)) for actions in lowered)


@pytest.mark.parametrize("prefetch", sorted(TWO_STAGES))
def test_lowered_actions_of_two_stages_by_prefetch(prefetch):
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
    assert texts(lower(plan, prefetch)) == TWO_STAGES[prefetch]


def test_skip_edge_is_sent_directly_and_sends_are_ordered_by_destination():
    edges = (StageEdge(0, 2, 5, 5), StageEdge(0, 1, 5, 5), StageEdge(1, 2, 5, 5))
    plan = plan_of(orders("0F0 0B0", "1F0 1B0", "2F0 2B0"), (0, 1, 2), edges=edges)
    assert texts(lower(plan, 0)) == (
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0RECV_B0<2 0B0 0STEP",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP",
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0 2SEND_B0>1 2STEP",
    )


def test_gradients_are_reduced_after_the_last_backward_of_their_stage():
    rows = orders("0F0 0F1 3F0 3F1 3I0 3I1 3W0 0B0 3W1 0B1", "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1")
    tied = (TiedWeight("embedding", (0, 3), 8),)
    lowered = lower(plan_of(rows, (0, 1, 1, 0), tied=tied, data=2), 0)
    assert texts(lowered)[0].endswith(
        "3W1 3REDUCE_GRAD 0RECV_B1<1 0B1 0REDUCE_GRAD 0REDUCE_TIED 3REDUCE_TIED 0STEP 3STEP"
    )
    assert texts(lowered)[1].endswith("2B1 2REDUCE_GRAD 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1REDUCE_GRAD 1STEP 2STEP")


@given(plans(), st.integers(0, 4))
def test_lowered_plan_keeps_compute_orders_and_matches_sends_with_receives(plan, prefetch):
    lowered = lower(plan, prefetch)
    assert tuple(tuple(a for a in actions if a.kind in COMPUTE_KINDS) for actions in lowered) == plan.device_actions
    sent, received = {}, {}
    for device, actions in enumerate(lowered):
        seen = set()
        for action in actions:
            if action.kind in SEND_KINDS:
                sent.setdefault((device, plan.placement[action.peer]), []).append(action)
            elif action.kind in RECV_KINDS:
                received.setdefault((plan.placement[action.peer], device), []).append(action.counterpart)
                reader = Kind.F if action.kind is Kind.RECV_F else Kind.B
                assert (action.stage, reader, action.microbatch) not in seen
            elif action.kind in COMPUTE_KINDS:
                seen.add((action.stage, Kind.B if action.kind is Kind.I else action.kind, action.microbatch))
    assert sent == received
    across = [edge for edge in plan.edges if plan.placement[edge.src] != plan.placement[edge.dst]]
    messages = sum(1 + (edge.gradient_bytes > 0) for edge in across) * plan.microbatches
    assert sum(map(len, sent.values())) == messages
