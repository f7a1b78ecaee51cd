"""Steps that wait for all stages: lowered, validated, in plan files, and in the time of a step."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import TiedWeight, parse_plan, plan_json
from panpipe.core.search import longest_path
from panpipe.core.validation.validate import validate
from panpipe.simulators.optimizer_step import OptimizerStep
from panpipe.simulators.run import simulate

from ...support.plans import orders, plan_of, plans

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


@hypothesis_settings(max_examples=25)
@given(plans())
def test_the_longest_path_has_the_time_of_the_simulator(plan):
    """Where no link is shared and nothing is tied."""
    plan = evolve(plan, sync=True, tied=())
    validate(plan)
    costs, cluster = plan.prediction.costs, plan.prediction.cluster
    cluster = fully_connected(len(cluster.devices), 10**9, float("inf"), 0.5)
    found = simulate(evolve(plan, sync=True), costs, cluster, eager=True)
    assert longest_path(plan, costs, cluster).step_s == pytest.approx(found.step_s)
