"""Plans whose replicas share optimizers: levels, actions, costs, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import check_agrees
from panpipe.core.plan.plan import Plan, Prediction, Stage, TiedWeight
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

COSTS = (
    StageCosts(1.0, 1.0, 1.0, optimizer_s=0.5, parameter_bytes=100, gradient_bytes=100, optimizer_bytes=201),
    StageCosts(1.0, 1.0, 1.0, optimizer_s=0.5, parameter_bytes=60, gradient_bytes=40, optimizer_bytes=80),
)
LINKS = tuple(Link(f"g{i}", "sw", 100.0, 0.0) for i in range(4))


def cluster() -> Cluster:
    from panpipe.core.cluster.cluster import Hub

    return Cluster(tuple(Device(f"g{i}", 10_000) for i in range(4)), (Hub("sw"),), LINKS)


def plan_of(*shard: str, data: int = 2, tied: tuple[TiedWeight, ...] = ()) -> Plan:
    orders = tuple(tuple(map(parse_action, text.split())) for text in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    stages = (Stage(0, 0, ("a",)), Stage(1, 1, ("b",)))
    plan = Plan("m", "h", Mesh(2, data), 2, "gpipe", stages, (), orders, tied=tied, shard=shard)
    prediction = Prediction(COSTS, cluster(), 1.0, (0.0, 0.0), (0.0, 0.0), 0.0)
    return evolve(plan, prediction=prediction)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of("optimizer"), "shard has 1 levels and the plan has 2 stages"),
        (plan_of("optimizer", "both"), "shard is 'both': give one of 'none', 'optimizer'"),
        (plan_of("optimizer", "parameters"), "memory.unshard lacks stage 1, whose replicas share parameters"),
        (plan_of("none", "optimizer", data=1), "stage 1 has shard 'optimizer' and the mesh has one replica"),
        (
            plan_of("none", "optimizer", tied=(TiedWeight("w", (0, 1), 8),)),
            r"the stages of tied weight 'w' have different shard levels \(stage 0 'none', stage 1 'optimizer'\)",
        ),
    ],
)
def test_wrong_levels_are_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        validate(plan)


def test_shared_gradients_take_less_memory_and_sums_of_each_microbatch() -> None:
    plan = plan_of("gradients", "none")
    result, score, report = simulate(plan), longest_path(plan, COSTS, cluster()), validate(plan)
    # 1/2 of the gradients of 100 bytes, and two slots of an unknown largest gradient: 1/16 of 100 bytes, rounded up.
    held = 100 + 50 + 2 * 7 + 101
    assert [found.peak_memory_bytes[0] for found in (result, score, report)] == [held] * 3
    # Each sum sends 50 bytes at 100 bytes/s; the second backward waits for the first.
    ends = 4 + 0.5 + 2 + 0.5 + 0.25 + 0.5
    assert result.step_s == pytest.approx(ends)
    assert score.step_s == pytest.approx(ends)
    scatters = [
        (task.start_s, task.end_s, task.bytes) for task in result.tasks if task.action.kind is Kind.SCATTER_GRAD
    ]
    assert scatters == [(4.0, 4.5, 100), (6.5, 7.0, 100)] * 2
    slow = [evolve(COSTS[0], gradient_bytes=300), COSTS[1]]
    late = simulate(plan, slow)
    assert late.step_s == pytest.approx(4 + 1.5 + 2 + 1.5 + 0.25 + 1.5)
    assert late.bubbles[0]["reduction"] == pytest.approx(1.5 + 1.5 + 1.5)
    assert longest_path(plan, tuple(slow), cluster()).step_s == pytest.approx(late.step_s)


def test_plan_that_contradicts_the_level_asked_for_is_refused() -> None:
    plan = plan_of("optimizer", "none")
    check_agrees(plan, None, "auto", None, None, "auto")
    with pytest.raises(RequestError, match="shard is 'optimizer' and the plan has shard optimizer, none"):
        check_agrees(plan, None, "auto", None, None, "optimizer")
    check_agrees(plan_of(), None, "auto", None, None, "none")
