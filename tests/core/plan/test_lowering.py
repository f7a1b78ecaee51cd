"""Lowering: literal tables, queue order, the end of a step, forwards alone, and what is refused."""

import json
from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.memory_policy import StageUnshard
from panpipe.core.plan.plan import TiedWeight, parse_plan, plan_json
from panpipe.core.schedules.registry import BUILT_IN
from panpipe.core.validation.validate import validate
from panpipe.simulators.optimizer_step import OptimizerStep
from panpipe.simulators.run import simulate

from ...support.plans import UNIT, orders, plan_of, plans, scheduled
from .test_unsharding import UNSHARD, runs, two_stages

# Lowering: literal tables, queue order, and what it refuses.


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


# Steps that wait for all stages: lowered, validated, in plan files, and in the time of a step.


COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25)
LOCAL = plan_of(
    orders("0F0 2F0 2B0 0B0", "1F0 1B0"), (0, 1, 0), costs=[COST] * 3, tied=(TiedWeight("embedding", (0, 2), 20),),
    cluster=fully_connected(2, 10**6, float("inf"), 0.5),
)  # fmt: skip
PLAN = evolve(LOCAL, sync=True)


def test_each_device_has_one_sync_between_reductions_and_steps():
    ends = [[str(a) for a in actions if a.microbatch is None] for actions in lower(PLAN)]
    assert ends == [["0REDUCE_TIED", "2REDUCE_TIED", "0SYNC", "0STEP", "2STEP"], ["1SYNC", "1STEP"]]


def test_plan_without_sync_has_the_same_file():
    assert "sync" not in json.loads(plan_json(LOCAL))
    assert not parse_plan(plan_json(LOCAL), "a file").sync
    assert parse_plan(plan_json(PLAN), "a file") == PLAN
    assert PLAN.hash != LOCAL.hash


def test_a_sync_that_the_plan_does_not_have_is_refused():
    with pytest.raises(RequestError, match="device 0 issues 0SYNC where the plan has 0STEP"):
        validate(LOCAL, lowered=lower(PLAN))


def test_all_steps_start_together_after_the_slowest_sync():
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"), (0, 1, 2), costs=[COST] * 3,
        cluster=fully_connected(3, 10**6, float("inf"), 0.5),
    )  # fmt: skip
    result = simulate(evolve(plan, sync=True))
    assert [starts[-1] for starts, _ in result.operation_times] == [12.0] * 3  # as with a barrier by hand
    assert [bubbles["optimizer"] for bubbles in result.bubbles] == [1.0, 3.5, 6.0]
    syncs = [(e.device, str(e.action), e.start_s, e.end_s) for e in result.trace.events if e.action.kind is Kind.SYNC]
    assert sorted(syncs) == [(0, "0SYNC", 11.0, 12.0), (1, "1SYNC", 8.5, 12.0), (2, "2SYNC", 6.0, 12.0)]
    assert simulate(evolve(plan, sync=True), optimizer=OptimizerStep.LOCAL).step_s == simulate(plan).step_s


# Plans of forwards alone: their orders, what they send and hold, and what they may not have.


NAMES = [family.name for family in BUILT_IN if family.name != "building-block"]


def plan_of_name(name, data=1):
    for chunks in (2, 1):
        try:
            return scheduled(name, 4, 8, chunks, data=data)
        except RequestError:
            continue
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_forwards_of_every_schedule_run_to_the_end_and_hold_nothing(name):
    plan = forward_only(plan_of_name(name, data=2))
    validate(plan)
    lowered = lower(plan)
    assert {a.kind for actions in lowered for a in actions} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    stages = len(plan.stages)
    result = simulate(plan, [UNIT] * stages, fully_connected(8, 10**9, float("inf"), 0.0))
    # Nobody waits but for the first microbatch to come and, in a V, the last one to go back.
    assert result.step_s <= 8 * stages / 4 + 2 * 3
    assert set(result.peak_saved_bytes) == {0.0}
    assert max(kinds["communication"] for kinds in result.peak_by_kind) <= 60  # of messages of 10 bytes
    validate(first_microbatches(plan, 3))
    assert parse_plan(plan_json(plan), "the plan") == plan


# Runs of stages whose replicas share parameters: what is refused.


@pytest.mark.parametrize(
    ("unshard", "reason"),
    [
        (UNSHARD[:1], "memory.unshard lacks stage 1, whose replicas share parameters: plan again, or give its runs"),
        (UNSHARD[::-1], r"memory.unshard names stages \[1, 0\]"),
        ((runs(0, (None, "0F0", "0F1")), UNSHARD[1]), "memory.unshard of stage 0 has 2 of its actions in runs"),
        ((runs(0, (None, "0F0", "0F1"), ("0F0", "0B0", "0B1")), UNSHARD[1]), "which is before the end of run 0, 0F1"),
        ((runs(0, ("0F0", "0F0", "0B1")), UNSHARD[1]), "after is 0F0, and 0F0 needs the parameters"),
        ((runs(0, (None, "0F0", "1F1")), UNSHARD[1]), "name the first and the last of some actions of stage 0"),
        ((runs(0, (None, "0B1", "0F0")), UNSHARD[1]), "goes from 0B1 to 0F0: name the first and the last"),
        ((runs(0, (None, "0F0", "0F7")), UNSHARD[1]), "last is 0F7, which is not in the order of device 0"),
        ((runs(0, ("0STEP", "0F0", "0F1")), UNSHARD[1]), "after is 0STEP, which is no compute"),
    ],
)
def test_wrong_runs_are_refused(unshard: Sequence[StageUnshard], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        validate(two_stages(unshard))
