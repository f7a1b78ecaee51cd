"""The planner: its plans are complete, within their limits, deterministic, and faster than its starts."""

from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, stage_costs, stage_edges
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.partition import device_limits, stages_of
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.plan.plan import TiedWeight, plan_json
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search import Score, longest_path
from panpipe.core.search.choose import choose_schedules, plan, search_plans
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.looped_cuts import evened, looped_cuts, prefix_of
from panpipe.core.search.problem.workload import workload_of
from panpipe.core.search.search_options import SearchOptions

ALL = tuple(families().values())
PLAIN = (find_family("1f1b"),)


def choose_schedule(*given, **more):
    return choose_schedules(*given, **more).best


def chain(times, **costs):
    nodes = tuple(OpNode(f"n{i}", time, time, time, optimizer_s=0.5, **costs) for i, time in enumerate(times))
    return OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 8) for i in range(len(times) - 1)), name="chain")


GRAPH = chain([1, 2, 1, 3, 1, 1, 2, 4, 1, 1, 1, 2, 1, 6], state_bytes=4, saved_bytes=2, workspace_bytes=1)
CLUSTER = fully_connected(2, 1000, 80.0, 0.01)


def planned(**changes):
    arguments = {"families": ALL, "oracle": longest_path, "budget": 5000} | changes
    graph, cluster = arguments.pop("graph", GRAPH), arguments.pop("cluster", CLUSTER)
    sizes = arguments.pop("parameter_sizes", None)
    return plan(graph, cluster, 4, SearchOptions(**arguments), parameter_sizes=sizes)


def test_plan_has_every_operator_once_in_order_and_every_action_once():
    chosen = planned()
    assert tuple(name for stage in chosen.stages for name in stage.nodes) == tuple(n.name for n in GRAPH.nodes)
    wanted = {(s.index, m) for s in chosen.stages for m in range(4)}
    for kinds in ({Kind.F}, {Kind.B, Kind.I}):
        done = [(a.stage, a.microbatch) for row in chosen.device_actions for a in row if a.kind in kinds]
        assert len(done) == len(wanted)
        assert set(done) == wanted


def test_prediction_equals_the_oracle_s_score_of_the_plan():
    chosen = planned()
    prediction = chosen.prediction
    stages = [stage.nodes for stage in chosen.stages]
    assert prediction.costs == stage_costs(GRAPH, stages)
    assert chosen.edges == stage_edges(GRAPH, stages)
    score = longest_path(chosen, prediction.costs, CLUSTER)
    assert (score.step_s, score.peak_memory_bytes) == (prediction.step_s, prediction.peak_memory_bytes)


def test_same_request_gives_the_same_bytes():
    assert plan_json(planned()) == plan_json(planned())


def test_annealed_orders_are_faster_than_the_families_orders():
    cluster = fully_connected(4, 1000, 80.0, 0.01)
    free, published = (planned(cluster=cluster, anneal=anneal).prediction.step_s for anneal in (True, False))
    assert free < published
    assert planned(families=PLAIN, anneal=False).schedule == "1f1b"


@pytest.mark.parametrize("budget", [1, 7, 40, 500])
def test_evaluations_are_counted_and_stay_within_the_budget(budget):
    told = []
    chosen = planned(budget=budget, progress=lambda *state: told.append(state))
    assert 1 <= chosen.prediction.evaluations <= budget
    assert [state[1] for state in told] == [budget] * len(told)
    assert told[-1][0] == chosen.prediction.evaluations
    assert told[-1][2] == pytest.approx(chosen.prediction.step_s)


def test_another_seed_gives_another_plan():
    options = [SearchOptions(families=ALL, budget=5000, seed=seed) for seed in (0, 0, 1)]
    plans = [search_plans(workload_of(GRAPH, CLUSTER, 4), CLUSTER, each).best for each in options]
    assert plan_json(plans[0]) == plan_json(plans[1]) != plan_json(plans[2])


def test_longer_search_finds_a_faster_plan():
    cluster = fully_connected(4, 1000, 80.0, 0.01)
    short, long = (planned(cluster=cluster, budget=budget).prediction.step_s for budget in (50, 20_000))
    assert long < short


def test_search_ended_by_time_or_interrupt_returns_the_best_plan_so_far():
    calls = []

    def interrupt(*state):
        calls.append(state)
        if len(calls) == 30:
            raise KeyboardInterrupt

    options = SearchOptions(families=ALL, budget=10**6, progress=interrupt)
    stopped = search_plans(workload_of(GRAPH, CLUSTER, 4), CLUSTER, options)
    assert stopped.stopped
    assert 0 < stopped.evaluations < 10**6
    assert stopped.best.prediction.step_s == longest_path(stopped.best, stopped.best.prediction.costs, CLUSTER).step_s
    for (budget, seconds), stops in (((10**8, 0.2), True), ((100, 100), False)):
        options = SearchOptions(families=ALL, budget=budget, seconds=seconds)
        assert search_plans(workload_of(GRAPH, CLUSTER, 4), CLUSTER, options).stopped == stops


def test_score_of_a_given_oracle_decides():
    asked = []

    def oracle(draft, costs, cluster):
        assert draft.prediction is None
        asked.append(draft)
        return Score(float(len(draft.stages)), (0.0,) * 2, (0.0,) * 2, 0.0)

    chosen = planned(oracle=oracle)
    assert len(asked) > 1
    assert len(chosen.stages) == min(len(draft.stages) for draft in asked) == chosen.prediction.step_s


def test_alternatives_hold_less_and_take_longer():
    found = search_plans(workload_of(GRAPH, CLUSTER, 4), CLUSTER, SearchOptions(families=ALL, budget=5000))
    plans = [plan.prediction for plan in found.plans]
    assert len(plans) > 1
    for one, other in pairwise(plans):
        assert one.step_s <= other.step_s
        assert max(one.peak_memory_bytes) > max(other.peak_memory_bytes)


def test_plan_stays_within_the_memory_limit():
    free = planned()
    tight = max(free.prediction.peak_memory_bytes) - 8
    limited = planned(memory_limit=tight)
    assert max(limited.prediction.peak_memory_bytes) <= tight


def test_infeasible_error_names_the_device_and_a_limit_that_fits():
    with pytest.raises(InfeasibleError, match=r"device \d \('device\d'\) needs \d+ bytes and may hold 20: ") as caught:
        planned(memory_limit=20)
    enough = float(str(caught.value).split()[-3])
    assert max(planned(memory_limit=enough).prediction.peak_memory_bytes) <= enough


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": chain([1])}, "2 devices for 1 operators.*use at most 1 devices"),
        ({"min_chunks": 9}, "2 devices with 9 stages each for 14 operators"),
        ({"budget": 0}, "0 evaluations"),
        ({"families": ()}, "no schedule of"),
        ({"memory_limit": 0}, "memory limit is 0 bytes"),
    ],
)
def test_wrong_request_is_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        planned(**changes)


def test_zero_microbatches_are_refused():
    with pytest.raises(RequestError, match="0 microbatches"):
        plan(GRAPH, CLUSTER, 0, SearchOptions(families=ALL, oracle=longest_path))


def test_chunks_can_be_bounded():
    assert len(planned(min_chunks=3, max_chunks=3).stages) == 6


def test_plan_for_one_device_has_all_actions_on_it():
    cluster = fully_connected(1, 1000, 1.0, 0.0)
    chosen = planned(cluster=cluster)
    compute = 4 * 3 * sum(node.forward_s for node in GRAPH.nodes)
    assert chosen.prediction.step_s == pytest.approx(compute + 0.5 * len(GRAPH.nodes))


# Tied weights.

TIED = OpGraph(
    (
        OpNode("embed", 1.0, 1.0, 1.0, parameter_bytes=10, state_bytes=40, parameters=("w",)),
        OpNode("mid", 1.0, 1.0, 1.0, parameter_bytes=6, state_bytes=24, parameters=("u", "v")),
        OpNode("head", 1.0, 1.0, 1.0, parameters=("w", "v")),
    ),
    (OpEdge("embed", "mid", 8), OpEdge("mid", "head", 8)),
)


def tied_plan(stages, **sizes):
    schedule = find_family("1f1b").build(ScheduleProblem(len(stages), 2))
    return assemble(TIED, stages, schedule, **sizes)


def test_parameter_in_two_stages_is_tied():
    draft = tied_plan([["embed"], ["mid"], ["head"]], parameter_sizes={"w": 10, "u": 2, "v": 4})
    assert draft.tied == (TiedWeight("w", (0, 2), 10), TiedWeight("v", (1, 2), 4))
    assert [stage.parameters for stage in draft.stages] == [("w",), ("u", "v"), ("w", "v")]


def test_parameter_in_one_stage_is_not_tied():
    assert tied_plan([["embed"], ["mid", "head"]]).tied == (TiedWeight("w", (0, 1), 10),)


def test_unknown_size_of_a_tied_parameter_is_refused():
    with pytest.raises(RequestError, match=r"size of parameter 'v'.*parameter_sizes"):
        tied_plan([["embed"], ["mid"], ["head"]])


def test_each_replica_of_a_tied_weight_takes_memory():
    cluster = fully_connected(2, 1000, 80.0, 0.01)
    sizes = {"w": 10, "u": 2, "v": 4}
    chosen = planned(graph=TIED, cluster=cluster, parameter_sizes=sizes)
    replicas = sum(weight.bytes for weight in chosen.tied)
    assert replicas >= 10
    assert sum(cost.state_bytes for cost in chosen.prediction.costs) == 64 + 4 * replicas


# Stages that are cut already.

HALVES = stages_of(GRAPH, (0, 7, 14))
QUARTERS = stages_of(GRAPH, (0, 4, 8, 12, 14))


def test_choose_schedule_uses_the_measured_costs():
    stages = QUARTERS
    costs = tuple(StageCosts(1.0, 1.0, 1.0, backward_s=1.5, saved_bytes=3) for _ in stages)
    chosen = choose_schedule(GRAPH, stages, costs, CLUSTER, 4, SearchOptions(families=ALL, oracle=longest_path))
    assert chosen.prediction.costs == costs
    assert [stage.nodes for stage in chosen.stages] == list(stages)
    assert chosen.prediction.step_s == longest_path(chosen, costs, CLUSTER).step_s


def test_backwards_are_split_if_that_is_faster():
    stages = HALVES
    costs = stage_costs(GRAPH, stages)
    chosen = choose_schedule(
        GRAPH, stages, costs, CLUSTER, 4, SearchOptions(families=PLAIN, oracle=longest_path, budget=5000)
    )
    assert chosen.schedule == "auto(1f1b)"
    assert sum(a.kind is Kind.W for row in chosen.device_actions for a in row) >= 1
    # Halves that take longer than the whole by more than they save are left whole.
    fast = [evolve(cost, backward_s=0.1 * cost.full_backward_s) for cost in costs]
    whole = choose_schedule(
        GRAPH, stages, fast, CLUSTER, 4, SearchOptions(families=PLAIN, oracle=longest_path, budget=5000)
    )
    assert {a.kind for row in whole.device_actions for a in row} == {Kind.F, Kind.B}
    plain = choose_schedule(
        GRAPH, stages, costs, CLUSTER, 4, SearchOptions(families=PLAIN, oracle=longest_path, anneal=False)
    )
    assert plain.schedule == "1f1b"


def test_choose_schedule_stays_within_memory():
    stages = HALVES
    costs = tuple(StageCosts(1.0, 1.0, 1.0, saved_bytes=10) for _ in stages)
    chosen = choose_schedule(
        GRAPH, stages, costs, CLUSTER, 4, SearchOptions(families=ALL, oracle=longest_path, memory_limit=20)
    )
    assert max(chosen.prediction.peak_memory_bytes) <= 20
    with pytest.raises(InfeasibleError, match="may hold 9"):
        choose_schedule(
            GRAPH, stages, costs, CLUSTER, 4, SearchOptions(families=ALL, oracle=longest_path, memory_limit=9)
        )


def test_choose_schedule_refuses_stages_that_do_not_fit_the_devices():
    with pytest.raises(RequestError, match="3 stages with 3 costs for 2 devices"):
        choose_schedule(
            GRAPH, [["n0"]] * 3, [StageCosts(1, 1, 1)] * 3, CLUSTER, 4, SearchOptions(families=ALL, oracle=longest_path)
        )


def test_assemble_refuses_a_schedule_for_other_stages():
    schedule = find_family("1f1b").build(ScheduleProblem(2, 2))
    with pytest.raises(RequestError, match="places 2 stages and the partition has 3"):
        assemble(TIED, [["embed"], ["mid"], ["head"]], schedule)


# Shapes.


@given(st.lists(st.integers(0, 9), min_size=6, max_size=30), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=50)
def test_shapes_leave_no_stage_empty(times, devices, chunks):
    prefix = prefix_of(chain(times))
    for loops in ([1.0] * chunks, [1.0 + loop for loop in range(chunks)]):
        cuts = looped_cuts(prefix, devices, loops)
        assert len(cuts) == devices * chunks + 1
        assert (cuts[0], cuts[-1]) == (0, len(times))
        assert all(a < b for a, b in pairwise(cuts))


def test_memory_limit_is_above_zero_and_at_most_the_device_s_memory():
    cluster = fully_connected(2, 100, 1.0, 0.0)
    assert device_limits(cluster, 50) == (50, 50)
    assert device_limits(cluster, 500) == (100, 100)
    with pytest.raises(RequestError, match="-1"):
        device_limits(cluster, -1)


def test_evened_stages_of_equal_operators():
    assert evened(prefix_of(chain([1] * 12)), 0, 12, 4) == [0, 3, 6, 9, 12]


def test_longest_path_by_hand():
    # 1F1B, two devices, two microbatches, F 1, B 2, a hop of 1 each way (0.5 s and 8 bytes at 16 bytes/s), optimizers
    # of 0.5 and 3. Device 0: F0 0–1, F1 1–2, waits for B0's gradient. Device 1: F0 2–3, B0 3–5, F1 5–6, B1 6–8.
    # Device 0: B0 6–8, B1 9–11, optimizer to 11.5. Device 1: optimizer from 8 to 11.
    graph = OpGraph(
        (
            OpNode("a", 1, 1, 1, 0.5, state_bytes=100, saved_bytes=10, workspace_bytes=3),
            OpNode("b", 1, 1, 1, 3, state_bytes=200, saved_bytes=20, workspace_bytes=4),
        ),
        (OpEdge("a", "b", 8),),
    )
    stages = [["a"], ["b"]]
    draft = assemble(graph, stages, find_family("1f1b").build(ScheduleProblem(2, 2)))
    score = longest_path(draft, stage_costs(graph, stages), fully_connected(2, 1000, 16.0, 0.5))
    assert score.step_s == 11.5
    assert score.peak_memory_bytes == (123, 224)
    assert score.peak_saved_bytes == (20, 20)
    assert score.bubble_ratio == 1 - 6 / 11.5


def test_memory_that_only_the_oracle_counts_stays_within_the_limit():
    """An oracle that counts messages: the limit holds by its word, and the plan is not one that gave up its order."""

    def with_messages(plan, costs, cluster):
        score = longest_path(plan, costs, cluster)
        busiest = max(range(plan.devices), key=lambda device: score.peak_saved_bytes[device])
        peaks = [peak + 8 * (device == busiest) for device, peak in enumerate(score.peak_memory_bytes)]
        return evolve(score, peak_memory_bytes=tuple(peaks))

    free = planned(memory_limit=1000.0)
    tight = max(free.prediction.peak_memory_bytes) + 20  # less than the messages that the search reserves memory for
    chosen = planned(memory_limit=tight, oracle=with_messages)
    assert max(chosen.prediction.peak_memory_bytes) <= tight
    assert chosen.prediction.step_s <= 1.1 * free.prediction.step_s
