"""Plans whose replicas share optimizers: levels, actions, costs, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import check_agrees, forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.plan.plan import Plan, Prediction, Stage, TiedWeight, parse_plan, plan_json
from panpipe.core.policies.sharding import (
    LEVELS,
    graph_slots_bytes,
    part_of,
    part_of_graph,
    replica_costs,
    slots_bytes,
)
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


def kinds(plan: Plan, device: int) -> list[str]:
    return [str(action) for action in lower(plan)[device] if action.microbatch is None]


def test_lowering_gathers_a_sharded_stage_after_its_step() -> None:
    assert kinds(plan_of("optimizer", "none"), 0) == ["0REDUCE_GRAD", "0STEP", "0UNSHARD"]
    assert kinds(plan_of("optimizer", "none"), 1) == ["1REDUCE_GRAD", "1STEP"]
    assert kinds(plan_of(), 0) == ["0REDUCE_GRAD", "0STEP"]


def test_evaluation_of_a_sharded_plan_gathers_nothing() -> None:
    assert forward_only(plan_of("optimizer", "optimizer")).shard == ()


def test_plans_without_sharding_keep_their_bytes_and_hashes_and_others_are_read_again() -> None:
    assert "shard" not in plan_json(plan_of())
    plan = plan_of("optimizer", "none")
    assert parse_plan(plan_json(plan), "it") == plan
    assert plan.hash != plan_of().hash


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


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0UNSHARD", None, "stage 0 is sharded and no device issues 0UNSHARD: add it"),
        ("0UNSHARD", "0UNSHARD 0UNSHARD", "stage 0 is not sharded, or has one already"),
        ("1STEP", "1STEP 1UNSHARD", "stage 1 is not sharded, or has one already"),
        ("0STEP 0UNSHARD", "0UNSHARD 0STEP", "before 0STEP, which computes what it gathers"),
    ],
)
def test_misplaced_gathers_are_refused(old: str, new: str | None, reason: str) -> None:
    plan = plan_of("optimizer", "none")
    texts = [" ".join(map(str, actions)).replace(old, new or "") for actions in lower(plan)]
    lowered = [[parse_action(text) for text in each.split()] for each in texts]
    with pytest.raises(RequestError, match=reason):
        queues_of(plan, lowered)


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
def test_parameters_are_gathered_after_the_steps_that_wait_for_all_stages(level: str) -> None:
    plan = evolve(plan_of(level, level), sync=True)
    validate(plan)
    assert kinds(plan, 0) == ["0REDUCE_GRAD", "0SYNC", "0STEP", "0UNSHARD"]


def test_one_replica_holds_and_steps_its_part() -> None:
    first, second = replica_costs(plan_of("optimizer", "none"), COSTS)
    assert (first.optimizer_bytes, first.optimizer_s) == (101, 0.25)
    assert (first.parameter_bytes, first.gradient_bytes) == (100, 100)
    assert second == COSTS[1]
    assert replica_costs(plan_of("optimizer", "optimizer", data=1), COSTS) == COSTS


def test_memory_and_times_of_simulator_validation_and_oracle_agree() -> None:
    plan = plan_of("optimizer", "none")
    result, score, report = simulate(plan), longest_path(plan, COSTS, cluster()), validate(plan)
    # Each device sends half of 100 bytes at 100 bytes/s before the step, and as many after it.
    ends = 6 + 0.5 + 0.25 + 0.5
    assert result.step_s == pytest.approx(ends)
    assert score.step_s == pytest.approx(ends)
    assert result.peak_memory_bytes[:2] == (301, 180)
    assert score.peak_memory_bytes == (301, 180)
    assert report.peak_memory_bytes == (301, 180)
    whole = simulate(plan_of())
    assert whole.peak_memory_bytes[:2] == (401, 180)
    assert whole.step_s == pytest.approx(6 + 1.0 + 0.5)


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


def test_sums_share_links_with_messages() -> None:
    plan = evolve(plan_of("gradients", "gradients"), edges=(StageEdge(0, 1, 40, 40),))
    costs = [evolve(cost, gradient_bytes=400) for cost in COSTS]
    together, apart = (simulate(plan, costs, sharing=sharing) for sharing in (True, False))
    assert together.step_s > apart.step_s + 0.1  # each device has one link for both
    assert any(bubbles["contention"] > 0 for bubbles in together.bubbles)


def test_stages_of_a_device_use_the_same_slots() -> None:
    plan = plan_of("gradients", "gradients")
    costs = [evolve(COSTS[0], gradient_bytes=1600, largest_gradient_bytes=size) for size in (100, 300)]
    apart = [cost.gradient_bytes for cost in replica_costs(plan, costs)]
    assert apart == [800 + 200, 800 + 600]
    together = evolve(plan, stages=tuple(evolve(stage, device=0) for stage in plan.stages))
    assert [cost.gradient_bytes for cost in replica_costs(together, costs)] == [800, 800 + 600]
    assert [cost.gradient_bytes for cost in replica_costs(evolve(together, shard=("gradients", "none")), costs)] == [
        800 + 200, 1600,
    ]  # fmt: skip


def test_slots_are_two_of_the_largest_gradient_but_no_more_than_all() -> None:
    assert slots_bytes(1600, 0) == 200
    assert slots_bytes(1600, 300) == 600
    assert slots_bytes(1600, 1000) == 1600
    assert slots_bytes(10**10, 0) == 2 * 25 * 2**20
    assert part_of(evolve(COSTS[0], gradient_bytes=1601, largest_gradient_bytes=300), 4, "gradients") == evolve(
        COSTS[0], gradient_bytes=401 + 600, optimizer_bytes=51, optimizer_s=0.125, largest_gradient_bytes=300
    )


def test_part_of_a_graph_has_slots_apart() -> None:
    graph = OpGraph((OpNode("a", 1, 1, 1, 1.0, 100, 400), OpNode("b", 1, 1, 1, 1.0, 100, 150)))
    held = {level: [node.state_bytes for node in part_of_graph(graph, 4, level).nodes] for level in LEVELS}
    assert held == {"none": [400, 150], "optimizer": [250, 150], "gradients": [175, 113], "parameters": [100, 38]}
    assert graph_slots_bytes(graph, 1) == 150
    assert graph_slots_bytes(graph, 2) == 75  # no more than the gradients


def test_gather_is_idle_time_of_reductions() -> None:
    result = simulate(plan_of("optimizer", "none"))
    assert result.bubbles[0]["reduction"] == pytest.approx(1.0)
    for bubbles, busy in zip(result.bubbles, result.operation_times, strict=True):
        spans = sum(end - start for start, end in zip(*busy, strict=True))
        assert sum(bubbles.values()) + spans == pytest.approx(result.step_s)


def test_plan_that_contradicts_the_level_asked_for_is_refused() -> None:
    plan = plan_of("optimizer", "none")
    check_agrees(plan, None, "auto", None, None, "auto")
    with pytest.raises(RequestError, match="shard is 'optimizer' and the plan has shard optimizer, none"):
        check_agrees(plan, None, "auto", None, None, "optimizer")
    check_agrees(plan_of(), None, "auto", None, None, "none")


def test_part_of_a_stage_is_rounded_up() -> None:
    assert part_of(COSTS[0], 4).optimizer_bytes == 51


def test_part_of_a_stage_whose_replicas_share_parameters() -> None:
    cost = evolve(COSTS[0], parameter_bytes=140, gradient_bytes=101, shared_bytes=9)  # 39 bytes of frozen parameters
    part = part_of(cost, 4, "parameters")
    assert (part.parameter_bytes, part.gathered_bytes, part.shared_bytes) == (35, 140 + 9, 0)
    assert part.gradient_bytes == part_of(cost, 4, "gradients").gradient_bytes


def test_unshard_has_the_number_of_a_run_or_none() -> None:
    assert parse_action("3UNSHARD") == Action(3, Kind.UNSHARD)
    assert parse_action("3UNSHARD2") == Action(3, Kind.UNSHARD, 2)
    with pytest.raises(RequestError, match="RESHARD needs a microbatch"):
        parse_action("3RESHARD")
