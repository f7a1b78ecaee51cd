"""Choosing among rehearsed plans: what noise hides, it does not decide."""

import math
import random
from types import SimpleNamespace

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.collective_times import CollectiveTimes
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.message_overhead import MessageTimes
from panpipe.core.search.suggestions.preference import preference
from panpipe.core.trace.trace import Trace
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning.automatic import efficiency
from panpipe.runtimes.planning.budget import Budget
from panpipe.runtimes.planning.options import PlanningOptions
from panpipe.runtimes.planning.rehearsed import Rehearsal, length_ratio, times_scaled
from panpipe.runtimes.rehearsal import PLAIN, Candidate, best_rehearsed, has_room_for_stand_ins, undecided, winner
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate

from ..support.plans import hosted, leaves, orders, plan_of


def candidate(schedule, times, speeds=None):
    seen = [
        Rehearsal(Trace("measured", "", 1, (), (), time), MessageTimes({}, {}), None, speed)
        for time, speed in zip(times, speeds or [1.0] * len(times), strict=True)
    ]
    return Candidate(SimpleNamespace(rank_plan=SimpleNamespace(schedule=schedule)), simulated, None, seen)


def chosen(*candidates):
    return winner(candidates, PLAIN).pipe.rank_plan.schedule


def test_plan_with_more_memory_is_chosen_if_every_turn_shows_it_faster():
    assert chosen(candidate("1f1b", [1.00, 1.02, 0.99, 1.01]), candidate("zb-v", [0.95, 0.97, 0.93, 0.97])) == "zb-v"


def test_1f1b_is_chosen_if_turns_disagree():
    assert chosen(candidate("1f1b", [1.00, 1.02, 0.90, 1.01]), candidate("zb-v", [0.95, 0.97, 0.93, 0.97])) == "1f1b"


def test_plan_with_less_memory_is_chosen_if_it_is_as_fast_as_1f1b():
    plain = candidate("1f1b", [1.0, 1.0, 1.0, 1.0])
    assert chosen(candidate("v-min", [1.01, 1.0, 1.01, 0.99]), plain) == "v-min"
    assert chosen(candidate("v-min", [1.03, 1.0, 1.01, 0.99]), plain) == "1f1b"


def test_1f1b_is_chosen_on_a_loaded_machine():
    source = random.Random(0)
    noisy = [[math.exp(source.gauss(0, 0.3)) for _ in range(8)] for _ in range(800)]
    found = [chosen(candidate("v-min", a), candidate("1f1b", b)) for a, b in zip(noisy[::2], noisy[1::2], strict=True)]
    assert found.count("1f1b") >= 0.85 * len(found)


def test_rehearsing_stops_for_a_gain_below_the_noise():
    plain, other = candidate("1f1b", [1.0, 1.0, 1.0, 1.0]), candidate("zb-v", [1.1, 0.89, 1.1, 0.9])
    assert undecided([plain, other], PLAIN) == [plain]
    other = candidate("zb-v", [1.01, 0.95, 0.96, 0.97])
    assert undecided([plain, other], PLAIN) == [plain, other]
    other = candidate("zb-v", [0.95, 0.96, 0.94, 0.95])
    assert undecided([plain, other], PLAIN) == [other]


def test_rehearsing_continues_while_a_plan_with_less_memory_may_be_as_fast_as_1f1b():
    plain = candidate("1f1b", [1.0, 1.0, 1.0, 1.0])
    found = [undecided([candidate("v-min", times), plain], PLAIN) for times in (
        [1.025, 1.0, 0.99, 1.0], [1.3, 0.9, 1.2, 0.9], [1.01, 1.0, 1.01, 0.99]
    )]  # fmt: skip
    assert [[each.pipe.rank_plan.schedule for each in left] for left in found] == [
        ["v-min", "1f1b"],
        ["1f1b"],
        ["v-min"],
    ]


def test_without_1f1b_the_preferred_plan_is_chosen_unless_another_is_faster():
    assert chosen(candidate("zb-h1", [1.0, 1.1, 0.9, 1.0]), candidate("v-half", [1.0, 1.0, 1.0, 1.0])) == "zb-h1"
    assert chosen(candidate("zb-h1", [1.0, 1.1, 1.1, 1.1]), candidate("v-half", [0.9, 1.0, 1.0, 1.0])) == "v-half"


def predicted_plan(costs):
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=costs)
    assert plan.prediction is not None
    return plan


def test_rehearsed_step_time_is_that_of_the_whole_call():
    trace = Trace("measured", "", 1, (), (), 1.0)
    assert Rehearsal(trace, MessageTimes({}, {})).step_s == 1.0
    assert Rehearsal(trace, MessageTimes({}, {}), 1.1).step_s == 1.1


def taking(seconds):
    """A plan of a microbatch whose stages compute for 3 s each, predicted to take this long."""
    plan = predicted_plan([StageCosts(1, 1, 1)] * 2)
    return evolve(plan, prediction=evolve(plan.prediction, step_s=seconds))


def test_efficiency_is_the_share_of_the_step_in_which_devices_compute():
    assert efficiency(taking(6.0)) == pytest.approx(0.5)


def budgeted(plans, plain, budget):
    """The first plan that is rehearsed, and what was cut."""
    rehearsed = []

    def ready(plan):
        rehearsed.append(plan.schedule)
        raise StopRehearsing

    planning = SimpleNamespace(
        plans=lambda: plans, plain=lambda plans: plain,
        options=PlanningOptions(oracle=simulated, cut_oracle=simulated, schedule="1f1b"),
        budget=budget, team=ThreadTeam(2),
    )  # fmt: skip
    with pytest.raises(StopRehearsing):
        best_rehearsed(planning, ready, None)
    return rehearsed, planning.budget.shortened


class StopRehearsing(Exception):
    """Raised in place of a pipeline."""


def test_only_1f1b_is_rehearsed_without_time_to_compare():
    plain, other = evolve(taking(3600.0), schedule="1f1b"), evolve(taking(1800.0), schedule="zb-h1")
    left_out = "comparing 1f1b with zb-h1 (predicted +100.0%), about 27000 s"
    budget = Budget.of(ThreadTeam(2), None)
    budget.expect_step(3600.0)
    assert budgeted([other], [plain], budget) == (["1f1b"], [left_out])
    assert budgeted([other], [plain], Budget(ThreadTeam(2))) == ([preferred_of(plain, other)], [])


def test_nothing_is_rehearsed_if_a_given_limit_has_no_time_for_it():
    plain, built = evolve(taking(10.0), schedule="1f1b"), []
    planning = SimpleNamespace(
        plans=lambda: [plain], plain=lambda plans: plans,
        options=PlanningOptions(oracle=simulated, cut_oracle=simulated, schedule="1f1b"),
        budget=Budget(ThreadTeam(2), 5.0), team=ThreadTeam(2),
    )  # fmt: skip
    assert best_rehearsed(planning, lambda plan: built.append(plan) or plan, None) is plain
    assert planning.budget.shortened == ["rehearsing, about 20 s"]
    assert budgeted([plain], [plain], Budget(ThreadTeam(2)))[0] == ["1f1b"]


def preferred_of(*plans):
    return min(plans, key=preference(["1f1b"])).schedule


def test_costs_are_scaled_to_the_rehearsed_steps():
    costs = (StageCosts(1.0, 1.0, 1.0, optimizer_s=5.0),) * 2
    plan = predicted_plan(list(costs))
    ratio = length_ratio(plan, costs, [6.6, 6.6, 6.6, 6.6, 9.0], simulated)
    assert ratio == pytest.approx(6.6 / 6.0)
    assert plan.prediction.cluster == fully_connected(2, 10**9, float("inf"), 0.0)
    assert simulated(plan, times_scaled(costs, ratio), plan.prediction.cluster).step_s == pytest.approx(6.6 + 5.0)


@pytest.mark.parametrize(("level", "ratio"), [("none", 1.0), ("optimizer", 1.25), ("gradients", 1.0)])
def test_prediction_of_replicas_is_the_rehearsed_step_in_which_stand_ins_step(level, ratio):
    """Sums take 3 s and gathers 2 s, each optimizer 4 s, and not the times that the plan has."""
    cost = StageCosts(1.0, 1.0, 1.0, gradient_bytes=40, largest_gradient_bytes=40, optimizer_s=0.5)
    plan = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), costs=[cost], cluster=fully_connected(2, 10**6, 40.0, 0.0))
    plan = evolve(plan, mesh=Mesh(1, 2), shard=() if level == "none" else (level,))
    slow = evolve(
        cost, optimizer_s=4.0 * (1 if level == "none" else 2), collectives=CollectiveTimes(level, 2, 3.0, 3.0, 2.0)
    )
    ran = evolve(plan, prediction=evolve(plan.predicted, costs=(slow,)))
    updated = simulate(ran).trace
    bare = simulate(evolve(plan, prediction=evolve(plan.predicted, costs=(evolve(slow, optimizer_s=0.0),)))).trace
    assert updated.step_s == bare.step_s + 4.0
    whole = Rehearsal(updated, MessageTimes({}, {}), updated.step_s * ratio)
    seen = [Rehearsal(bare, MessageTimes({}, {}), bare.step_s * ratio, updated=whole)] * 2
    pipe = SimpleNamespace(rank_plan=plan, rehearses=lambda batch: True)
    found = Candidate(pipe, simulated, None, seen).plan().prediction
    assert found.step_s == pytest.approx(updated.step_s * ratio)
    assert found.rehearsed_s == pytest.approx(bare.step_s * ratio)
    assert found.costs[0].optimizer_s == pytest.approx(slow.optimizer_s * ratio)
    assert found.costs[0].collectives.reduce_s == pytest.approx(3.0 * ratio)


def test_stand_ins_are_for_replicas_with_room_for_copies_of_what_optimizers_step():
    cost = StageCosts(1.0, 1.0, 1.0, gradient_bytes=40, optimizer_s=0.5)

    def room(memory, replicas=2, level="none", cost=cost):
        made = plan_of(orders("0F0 0B0"), (0,), costs=[cost], cluster=fully_connected(2, memory, 1.0, 0.0))
        made = evolve(made, mesh=Mesh(1, replicas), shard=() if level == "none" else (level,))
        return has_room_for_stand_ins(evolve(made, prediction=evolve(made.predicted, peak_memory_bytes=(100,))))

    assert [room(memory) for memory in (139, 140)] == [False, True]
    assert [room(memory, level="optimizer") for memory in (119, 120)] == [False, True]
    assert not room(1000, replicas=1)
    assert not room(1000, cost=evolve(cost, optimizer_s=0.0))


@pytest.mark.parametrize("ratio", [1.0, 1.25])
def test_rehearsed_copies_give_the_rates_and_the_step_of_a_plan_that_waits_for_them(ratio):
    """Copies of 200 bytes take 4 s and not 0.2 s: 0F1 waits for one and 0B0 for the other. Steps take ``ratio`` times
    as long as their parts."""
    fast, slow = (hosted(fully_connected(1, 10**6, 1.0, 0.0), rate) for rate in (1000.0, 50.0))
    plan = plan_of(
        orders("0F0 0F1 0B0 0B1"), (0,), costs=[StageCosts(1.0, 1.0, 1.0, saved_bytes=200)], cluster=fast,
        offload=[leaves(0, 200, "0: 0F1 0F1")],
    )  # fmt: skip
    trace = simulate(plan, cluster=slow).trace
    assert trace.step_s == pytest.approx(simulate(plan).step_s + 7.6)
    seen = [Rehearsal(trace, MessageTimes({}, {}), trace.step_s * ratio)] * 2
    pipe = SimpleNamespace(rank_plan=plan, rehearses=lambda batch: False)
    found = Candidate(pipe, simulated, None, seen).plan().prediction
    assert found.step_s == pytest.approx(trace.step_s * ratio)
    ((link, _),) = found.cluster.host_path(0)
    assert (link.rate(True), link.rate(False)) == pytest.approx((50.0 / ratio, 50.0 / ratio))
    given = Candidate(pipe, simulated, None, seen, given_cluster=True).plan().prediction
    assert given.cluster == fast
