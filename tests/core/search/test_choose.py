"""The planner: its plans are complete, within their limits, deterministic, and faster than its starts."""

from itertools import pairwise

import pytest
from attrs import evolve
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, stage_costs
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.partition import stages_of
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.plan.plan import TiedWeight, plan_json
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search import Score, longest_path
from panpipe.core.search.choose import choose_schedules, plan, search_plans
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.meter import Meter
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


def test_progress_goes_on_in_a_part_that_is_added():
    told = []
    meter = Meter(10, progress=lambda *state: told.append(state[:2]))
    meter.spend(8)
    part = meter.part(5)
    part.spend(5)
    meter.spend(part.spent)
    assert told == [(8, 10), (13, 13), (13, 13)]


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


def test_chunks_can_be_bounded():
    assert len(planned(min_chunks=3, max_chunks=3).stages) == 6


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


# Shapes.


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
