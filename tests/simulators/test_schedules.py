"""Whatever a builder or the search returns, SimPy's run takes as long and holds as much as the fast evaluation says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import InfeasibleError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import BUILT_IN
from panpipe.core.schedules.scored import Scored, exceeds, score
from panpipe.core.search.find_schedule import find_schedule
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ..support.plans import costs, plan_of

# Without building-block, which needs a block, and without the copies of po-h and po-f (`test_hosts`).
FAMILIES = tuple(family for family in BUILT_IN if family.name != "building-block" and not family.offloads)


@st.composite
def problems(draw, chunks):
    devices, count = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    stages = tuple(draw(costs()) for _ in range(devices * chunks))
    return ScheduleProblem(devices, count, chunks, stages, draw(st.sampled_from([0.0, 0.5, 3.0])))


def check(found: Scored) -> None:
    problem, schedule = found.problem, found.schedule
    cluster = fully_connected(problem.devices, 10**9, float("inf"), problem.hop_s)
    plan = plan_of(schedule.device_actions, schedule.placement, costs=problem.costs, cluster=cluster)
    validate(plan)
    run = simulate(plan, eager=True)
    last = [ends[: len(row)] for (_, ends), row in zip(run.operation_times, schedule.device_actions, strict=True)]
    assert max(end for ends in last for end in ends) == pytest.approx(found.result.makespan)
    assert run.peak_saved_bytes == pytest.approx(found.result.peak_memory)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=8)
@given(data=st.data())
def test_simulated_named_schedules_equal_the_evaluation(family, data):
    chunks = family.chunks[0] if family.chunks else data.draw(st.integers(1, 3))
    problem = data.draw(problems(chunks))
    check(score(problem, family.build(problem)))


@settings(max_examples=10)
@given(st.data(), st.integers(1, 3), st.one_of(st.none(), st.floats(0, 400)))
def test_simulated_searched_schedules_equal_the_evaluation(data, chunks, limit):
    problem = data.draw(problems(chunks))
    problem = ScheduleProblem(
        problem.devices, problem.microbatches, chunks, problem.costs, problem.hop_s, memory_limit=limit
    )
    try:
        found = find_schedule([problem], BUILT_IN, evaluations=500)
    except InfeasibleError as error:
        assert "raise the limit to at least" in str(error)  # noqa: PT017
        return
    check(found)
    assert not exceeds(found)
