"""Times of collectives over replicas from rehearsed steps, and a step that is predicted with them."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.collective_times import CollectiveTimes
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import parse_plan, plan_json
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.trace.trace import COLLECTIVE_QUEUE, Trace, TraceEvent
from panpipe.runtimes.planning.rehearsed import times_scaled
from panpipe.runtimes.planning.rehearsed_collectives import collective_seconds, with_collective_seconds
from panpipe.simulators.run import simulate

from ...support.plans import orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, gradient_bytes=40, optimizer_s=0.5)


def trace(*events):
    """A step with these (device, action, start, end)."""
    found = tuple(TraceEvent(d, COLLECTIVE_QUEUE, parse_action(name), a, b, 0) for d, name, a, b in events)
    return Trace("measured", "", 2, found, (), 1.0)


def plan(level):
    made = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), costs=[COST])
    return evolve(made, mesh=Mesh(1, 2), shard=() if level == "none" else (level,))


def test_time_is_the_mean_over_microbatches_and_replicas_and_a_quantile_over_steps():
    first = trace((0, "0SCATTER_GRAD0", 1.0, 2.0), (1, "0SCATTER_GRAD0", 1.0, 2.0), (0, "0SCATTER_GRAD1", 3.0, 6.0),
                  (1, "0SCATTER_GRAD1", 3.0, 8.0))  # fmt: skip
    second, third = (trace((0, "0SCATTER_GRAD0", 1.0, 1.0 + seconds)) for seconds in (4.5, 9.0))
    assert collective_seconds([first, second, third], 0.5) == {(0, Kind.SCATTER_GRAD): 4.5}
    assert collective_seconds([first], 0.5) == {(0, Kind.SCATTER_GRAD): 2.5}


def test_collective_that_was_issued_during_another_begins_at_the_end_of_that():
    found = collective_seconds([trace((0, "1REDUCE_GRAD", 1.0, 4.0), (0, "0REDUCE_GRAD", 2.0, 5.0))], 0.5)
    assert found == {(1, Kind.REDUCE_GRAD): 3.0, (0, Kind.REDUCE_GRAD): 1.0}
    assert collective_seconds([], 0.5) == {}


@pytest.mark.parametrize(
    ("level", "seconds", "step"),
    [
        ("none", {(0, Kind.REDUCE_GRAD): 3.0}, 6.0 + 3.0 + 0.5),
        ("optimizer", {(0, Kind.REDUCE_GRAD): 3.0, (0, Kind.UNSHARD): 2.0}, 6.0 + 3.0 + 0.25 + 2.0),
        # The second backward waits until the gradients of the first are summed.
        (
            "gradients",
            {(0, Kind.SCATTER_GRAD): 3.0, (0, Kind.REDUCE_GRAD): 0.125, (0, Kind.UNSHARD): 2.0},
            6.0 + 2 * 3.0 + 0.125 + 0.25 + 2.0,
        ),
    ],
)
def test_step_is_predicted_with_measured_times(level, seconds, step):
    made, cluster = plan(level), fully_connected(2, 10**6, 10.0, 1.0)
    costs = with_collective_seconds(made, [COST], seconds)
    assert longest_path(evolve(made, prediction=None), costs, cluster).step_s == step
    assert simulate(evolve(made, prediction=evolve(made.predicted, costs=costs, cluster=cluster))).step_s == step
    kinds = Kind.REDUCE_GRAD, Kind.SCATTER_GRAD, Kind.UNSHARD
    doubled = (2 * seconds[0, kind] if (0, kind) in seconds else None for kind in kinds)
    assert times_scaled(costs, 2.0)[0].collectives == CollectiveTimes(level, 2, *doubled)


def test_measured_times_are_those_of_what_the_replicas_shared_and_of_their_number():
    cluster = fully_connected(4, 10**6, 10.0, 1.0)
    costs = with_collective_seconds(plan("none"), [COST], {(0, Kind.REDUCE_GRAD): 3.0})
    for changed in (plan("optimizer"), evolve(plan("none"), mesh=Mesh(1, 4))):
        other = evolve(changed, prediction=None)
        assert longest_path(other, costs, cluster) == longest_path(other, (COST,), cluster)


def test_plan_with_measured_times_is_read_back_and_wrong_ones_are_refused():
    made = plan("optimizer")
    costs = with_collective_seconds(made, [COST], {(0, Kind.REDUCE_GRAD): 3.0})
    cluster = fully_connected(2, 10**6, 10.0, 1.0)
    whole = evolve(made, prediction=evolve(made.predicted, costs=costs, cluster=cluster))
    read = parse_plan(plan_json(whole), "the plan")
    assert read.predicted.costs == costs
    validate(read)
    assert "collectives" not in plan_json(evolve(whole, prediction=evolve(whole.predicted, costs=(COST,))))
    for name, value, reason in (("reduce_s", -1.0, "collectives.reduce_s of stage 0 is -1"), ("shard", "all", "shard")):
        wrong = evolve(COST, collectives=evolve(costs[0].collectives, **{name: value}))
        with pytest.raises(RequestError, match=reason):
            validate(evolve(whole, prediction=evolve(whole.predicted, costs=(wrong,))))
