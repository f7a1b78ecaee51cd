"""Whatever change an infeasible request's message suggests fits when it is asked for, whole search and all."""

import itertools

import pytest
from attrs import evolve
from panpipe.answers.plan import request as plan_request
from panpipe.answers.plan.costs import PlanningCosts
from panpipe.answers.plan.infeasible import InfeasibleAnswer
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import families
from panpipe.core.search import longest_path
from panpipe.core.search.suggestions.changes import MORE_MEMORY, OFFLOAD, Relaxation
from panpipe.core.search.suggestions.infeasible import NothingFits
from panpipe.core.trace.throughput import StepTotals

BUDGET = 600
FAMILIES = [families()[name] for name in ("1f1b", "interleaved-1f1b", "zb-h1", "gis")]


def layers(count):
    """An embedding with most of the state, blocks of three unlike operators, and a head with a large workspace."""
    nodes = [OpNode("embedding", 1, 0, 1, 0.5, 130, 520, 20, 4)]
    for i in range(count):
        nodes += [
            OpNode(f"attention{i}", 2, 2.5, 1.5, 0.1, 20, 80, 60, 4), OpNode(f"norm{i}", 0.1, 0.2, 0, 0, 0, 0, 7, 4),
            OpNode(f"mlp{i}", 4, 4, 4, 0.1, 40, 160, 45, 8),
        ]  # fmt: skip
    nodes.append(OpNode("head", 6, 6, 6, 0.3, 0, 0, 150, 200))
    edges = [OpEdge(a.name, b.name, 7) for a, b in itertools.pairwise(nodes)]
    return OpGraph(tuple(nodes), tuple(edges))


def request(devices, memory, microbatches, mesh=None):
    graph = layers(8)
    return plan_request.PlanRequest(
        lambda _: PlanningCosts(graph, {}, None, StepTotals()), fully_connected(devices, memory, 100.0, 0.01),
        microbatches,
        batch=1, families=FAMILIES, anneal=True, oracle=longest_path, mesh=mesh, analytic_costs=False, recompute="none",
        memory_limit=None, budget=BUDGET, seed=0,
    )  # fmt: skip


@pytest.mark.slow
def test_each_suggested_change_is_feasible_when_requested():
    devices, memory, microbatches = 4, 750, 4
    wanted = request(devices, memory, microbatches)
    with pytest.raises(NothingFits) as nothing:
        wanted.search()
    answer = InfeasibleAnswer(nothing.value, wanted)
    changes = {change.what: change for change in answer.changes}
    asked = {
        "more devices": lambda value: Relaxation(devices=value),
        "smaller microbatches": lambda value: Relaxation(parts=value // microbatches),
        "recompute": lambda _: Relaxation(recompute=True),
        OFFLOAD: lambda _: Relaxation(offload=True),
        MORE_MEMORY: lambda value: Relaxation(extra_bytes=value),
    }
    assert {"more devices", "smaller microbatches", MORE_MEMORY} <= set(changes)
    for what, change in changes.items():
        other = wanted.relaxed(asked[what](change.value))
        assert max(other.search().best.prediction.peak_memory_bytes) <= max(other.limits)
        assert change.found.prediction.cluster.devices[0].memory_bytes == other.machine.devices[0].memory_bytes


def test_change_keeps_the_rest_of_the_request():
    wanted = request(2, 1300, 6, mesh="pp=2")
    other = wanted.relaxed(Relaxation(parts=4))
    assert (other.microbatches, other.machine, other.costs.graph.nodes[0].saved_bytes) == (24, wanted.machine, 5)
    assert wanted.relaxed(Relaxation(extra_bytes=100)).limits == (1400, 1400)
    assert len(wanted.relaxed(Relaxation(devices=5)).machine.devices) == 5
    assert wanted.relaxed(Relaxation(recompute=True)).recompute is None
    assert wanted.relaxed(Relaxation(shard="optimizer")).shard == "optimizer"


@pytest.mark.parametrize(
    ("mesh", "shard", "replicas"),
    [
        ("pp=2,dp=2", "none", 2),
        ("auto", "none", 4),
        ("pp=4", "none", 1),
        ("pp=2,dp=2", "auto", 1),
        ("pp=2,dp=2", "optimizer", 2),
        ("pp=2,dp=2", "gradients", 2),
        ("pp=2,dp=2", "parameters", 1),
    ],
)  # fmt: skip
def test_replicas_that_hold_whole_optimizers_may_share_them(mesh, shard, replicas):
    assert evolve(request(4, 1300, 8, mesh), shard=shard).problem.replicas == replicas


@pytest.mark.parametrize(
    ("mesh", "other"), [(None, None), ("auto", "auto"), ("pp=4", "pp=8,dp=1"), ("dp=2,pp=2", "pp=4,dp=2")]
)
def test_more_devices_make_the_pipeline_longer(mesh, other):
    assert request(4, 1300, 6, mesh).relaxed(Relaxation(devices=8)).mesh == other
