"""The smallest changes with which a plan fits: what is searched, in which order, and what is reported."""

import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.plan.memory_policy import HostCopy, StageOffload, Storage
from panpipe.core.plan.plan import MemoryPolicy, Plan
from panpipe.core.search import longest_path
from panpipe.core.search.problem.oracle import with_costs
from panpipe.core.search.suggestions.changes import (
    NARROWED,
    InfeasibleRequest,
    Relaxation,
    more_memory,
    smallest_changes,
)
from panpipe.core.search.suggestions.infeasible import NothingFits, excess
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate

from ....support.plans import scheduled

GRAPH = OpGraph(
    tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, state_bytes=10, saved_bytes=5, workspace_bytes=3) for i in range(40)),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 9) for i in range(39)),
)
COST = StageCosts(1.0, 1.0, 1.0, parameter_bytes=40, gradient_bytes=40, saved_bytes=100, workspace_bytes=7)


SLIGHT = OpGraph(tuple(evolve(node, saved_bytes=0) for node in GRAPH.nodes), GRAPH.edges)
"""GRAPH without saved tensors: only its state limits which changes may fit."""
PEAKS = (287, 187)
"""Bytes that 1F1B holds on two devices: two microbatches and one, in addition to state and workspace."""


def closest_plan(**options) -> Plan:
    return predicted(scheduled("1f1b", 2, 4, **{"costs": [COST] * 2, **options}))


def predicted(plan: Plan) -> Plan:
    cluster = fully_connected(2, 400, 1.0, 0.0)
    score = longest_path(plan, plan.prediction.costs, cluster)
    prediction = evolve(
        plan.prediction, cluster=cluster, step_s=score.step_s, peak_memory_bytes=score.peak_memory_bytes
    )
    return evolve(plan, prediction=prediction)


def changes(limits, fits, rows=None, plan=None, microbatches=4):
    """The changes that are suggested if a plan is found for those with ``fits(asked)``, and all that were searched."""
    plan, tried = plan or closest_plan(), []

    def replan(asked):
        tried.append(asked)
        return plan if fits(asked) else None

    nothing, problem = NothingFits("", plan, limits), InfeasibleRequest(SLIGHT, microbatches, limits, rows=rows)
    found = smallest_changes(nothing, problem, None, replan, oracle=longest_path)
    return {change.what: change.value for change in found}, tried


@pytest.mark.parametrize("least", [77.0, 60.0, 13.0, 0.5, 300.0])
def test_more_memory_finds_the_smallest_memory_with_a_plan(least):
    plan, tried = closest_plan(), []

    def replan(asked):
        tried.append(asked.extra_bytes)
        assert asked == Relaxation(extra_bytes=asked.extra_bytes)
        return plan if asked.extra_bytes >= least else None

    found = more_memory(NothingFits("", plan, (210, 210)), InfeasibleRequest(SLIGHT, 4, (210, 210)), replan)
    assert found.value in tried
    assert found.value == int(found.value)
    assert least <= found.value <= max(least / (1 - NARROWED), 1)
    assert len(tried) <= 12


def test_state_that_cannot_fit_is_not_searched():
    never = lambda _: pytest.fail("it was searched")  # noqa: E731
    heavy = OpGraph(tuple(evolve(node, state_bytes=10**9) for node in GRAPH.nodes), GRAPH.edges)
    assert (
        more_memory(NothingFits("", closest_plan(), (100, 100)), InfeasibleRequest(heavy, 4, (100, 100)), never) is None
    )


@pytest.mark.parametrize(("asked", "fits"), [
    (Relaxation(), False), (Relaxation(devices=3), True), (Relaxation(extra_bytes=50), True),
    (Relaxation(extra_bytes=49), False), (Relaxation(parts=2), True), (Relaxation(recompute=True), True),
])  # fmt: skip
def test_may_fit_needs_all_state_and_one_microbatch_to_fit(asked, fits):
    assert InfeasibleRequest(GRAPH, 4, (250, 250)).may_fit(asked) is fits  # 400 bytes of state, 200 of saved tensors


def test_number_of_devices_is_found_by_doubling_and_bisection():
    found, tried = changes((250, 250), lambda asked: (asked.devices or 2) >= 5)
    assert found["more devices"] == 5
    assert [asked.devices for asked in tried if asked.devices] == [4, 8, 6, 5]


def test_microbatches_are_halved_as_long_as_they_have_rows():
    fits = lambda asked: asked.parts >= 4  # noqa: E731
    found, tried = changes((250, 250), fits, rows=16)
    assert found["smaller microbatches"] == 16
    assert [asked.parts for asked in tried if asked.parts > 1] == [2, 4]
    assert "smaller microbatches" not in changes((250, 250), fits, rows=8)[0]
    assert "smaller microbatches" not in changes((250, 250), fits, microbatches=None)[0]


def test_changes_that_cannot_fit_are_not_searched():
    found, tried = changes((187, 187), lambda _: True)
    assert found["more devices"] == 3  # all operators hold 400 bytes of state: two devices of 187 never suffice
    assert [asked for asked in tried if (asked.devices or 2) == 2] == []


def test_offload_suggests_what_the_plan_found_with_it_moves():
    copies = (
        HostCopy(0, parse_action("0F1"), parse_action("0F1")),
        HostCopy(1, parse_action("0B0"), parse_action("0B0")),
    )
    found = closest_plan()
    found = evolve(found, memory=MemoryPolicy(offload=(StageOffload(0, (Storage("a", 30), Storage("b", 7)), copies),)))
    nothing, problem = NothingFits("", closest_plan(), (250, 187)), InfeasibleRequest(SLIGHT, 4, (250, 187))
    listed = smallest_changes(nothing, problem, None, lambda c: found if c.offload else None, oracle=longest_path)
    assert [(change.what, change.value, change.found) for change in listed] == [("offload", 74, found)]
    offloads = evolve(problem, offload_excluded=False)
    assert smallest_changes(nothing, offloads, None, lambda c: found if c.offload else None, oracle=longest_path) == ()


def test_offload_is_left_out_where_the_plan_found_moves_nothing():
    plan = closest_plan()
    nothing, problem = NothingFits("", plan, (250, 187)), InfeasibleRequest(SLIGHT, 4, (250, 187))
    assert smallest_changes(nothing, problem, None, lambda c: plan if c.offload else None, oracle=longest_path) == ()


def test_shard_is_suggested_first_with_the_number_of_replicas_of_the_plan_found():
    found = evolve(scheduled("1f1b", 2, 4, data=2, costs=[COST] * 2), shard=("optimizer",) * 2)
    nothing, problem = NothingFits("", closest_plan(), (250, 187)), InfeasibleRequest(SLIGHT, 4, (250, 187), replicas=2)
    finds = lambda asked: found if asked in (Relaxation(shard="optimizer"), Relaxation(parts=2)) else None  # noqa: E731
    listed = smallest_changes(nothing, problem, None, finds, oracle=longest_path)
    assert [(change.what, change.value) for change in listed] == [("shard", 2), ("smaller microbatches", 8)]
    assert listed[0].found == found
    one = evolve(problem, replicas=1)
    assert [change.what for change in smallest_changes(nothing, one, None, finds, oracle=longest_path)] == [
        "smaller microbatches"
    ]


def test_shared_gradients_are_suggested_where_shared_optimizers_are_not_enough():
    found = evolve(scheduled("1f1b", 2, 4, data=2, costs=[COST] * 2), shard=("gradients",) * 2)
    nothing, problem = NothingFits("", closest_plan(), (250, 187)), InfeasibleRequest(SLIGHT, 4, (250, 187), replicas=2)
    asked = []

    def finds(change):
        asked.append(change)
        return found if change.shard == "gradients" else None

    for shard, levels in (("none", ["optimizer", "gradients"]), ("optimizer", ["gradients"])):
        asked.clear()
        listed = smallest_changes(nothing, evolve(problem, shard=shard), None, finds, oracle=longest_path)
        assert [(change.what, change.found) for change in listed] == [("shard", found)]
        assert [change.shard for change in asked if change.shard is not None] == levels


def test_shared_optimizer_may_fit_where_a_whole_one_cannot():
    nodes = (OpNode("n", 1.0, 1.0, 1.0, parameter_bytes=100, state_bytes=400),)
    problem = InfeasibleRequest(OpGraph(nodes), 4, (250,) * 4, replicas=4)
    assert not problem.may_fit(Relaxation())
    # 200 of parameter and gradient, a quarter of 200 of optimizer state
    assert problem.may_fit(Relaxation(shard="optimizer"))
    assert not evolve(problem, memory=(249,) * 4).may_fit(Relaxation(shard="optimizer"))


def test_state_that_all_devices_together_cannot_hold_is_not_helped_by_sharing():
    nodes = tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, parameter_bytes=100, state_bytes=400) for i in range(4))
    problem = InfeasibleRequest(OpGraph(nodes), 4, (399,) * 4, replicas=4)
    assert not problem.may_fit(Relaxation(shard="parameters"))
    assert evolve(problem, memory=(400,) * 4).may_fit(Relaxation(shard="parameters"))


def test_recompute_suggests_the_plan_with_the_fewest_recomputed_stages():
    # A stage that recomputes keeps 10 bytes a microbatch, and all 100 of the one that runs back.
    plan = predicted(scheduled("gpipe", 2, 4, costs=[evolve(COST, input_bytes=10)] * 2))
    assert plan.prediction.peak_memory_bytes == (487, 487)
    found = evolve(plan, memory=MemoryPolicy(recompute=(0, 1)))
    light = OpGraph((OpNode("n", 1.0, 1.0, 1.0),))

    def recomputed(limits, replan):
        nothing, problem = NothingFits("", plan, limits), InfeasibleRequest(light, 4, limits)
        listed = smallest_changes(nothing, problem, None, replan, oracle=longest_path)
        return {change.what: change.value for change in listed}.get("recompute")

    finds = lambda asked: found if asked == Relaxation(recompute=True) else None  # noqa: E731
    assert recomputed((300, 500), finds) == 1
    assert recomputed((300, 300), finds) == 2
    assert recomputed((200, 500), finds) == 2  # the found plan's
    assert recomputed((300, 500), lambda _: None) is None


def test_recompute_is_suggested_for_replicas():
    """The simulator reports the memory of every replica's devices, a plan that of each position."""
    plan = scheduled("gpipe", 2, 4, data=2, costs=[evolve(COST, input_bytes=10)] * 2)
    plan = with_costs(plan, plan.prediction.costs, simulated)
    assert len(simulate(plan).peak_memory_bytes) == 4
    assert len(plan.prediction.peak_memory_bytes) == 2
    first, second = plan.prediction.peak_memory_bytes
    limits = (0.8 * first, second)
    nothing, problem = (
        NothingFits("", plan, limits),
        InfeasibleRequest(OpGraph((OpNode("n", 1.0, 1.0, 1.0),)), 4, limits * 2),
    )
    found = evolve(plan, memory=MemoryPolicy(recompute=(0, 1)))
    listed = smallest_changes(
        nothing, problem, None, lambda asked: found if asked.recompute else None,
        oracle=simulated,
    )  # fmt: skip
    (fewest,) = (change for change in listed if change.what == "recompute")
    assert (fewest.value, fewest.found.memory.recompute) == (1, (0,))
    assert excess(fewest.found, limits) == (0, 0)
