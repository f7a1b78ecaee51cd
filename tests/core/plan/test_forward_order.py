"""Plans of forwards alone: their orders, what they send and hold, and what they may not have."""

import pytest
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import parse_plan, plan_json
from panpipe.core.schedules.registry import BUILT_IN
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.plans import UNIT, scheduled

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
