"""The cut of a measured model: a regular one unless another gains enough, and the correction by measured stages."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE
from panpipe.core.errors import RequestError
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.suggestions.regular_cuts import regular_cut
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning.budget import Budget
from panpipe.runtimes.planning.cuts import CutSearch
from panpipe.runtimes.planning.options import PlanningOptions

MICROBATCHES = 4


def chain(*seconds: float) -> OpGraph:
    """A chain of operators with these times, and equal messages between them."""
    nodes = tuple(OpNode(f"{i}", each, each, each) for i, each in enumerate(seconds))
    return OpGraph(nodes, tuple(OpEdge(a.name, b.name, 1) for a, b in pairwise(nodes)))


@pytest.fixture
def cuts():
    team = ThreadTeam(2)
    measured = SimpleNamespace(team=team, message=FREE, sizes={}, replicas=None)
    options = PlanningOptions(oracle=longest_path, cut_oracle=longest_path, schedule="1f1b")
    yield CutSearch(measured, fully_connected(2, 10**12, 1e12, 0.0), MICROBATCHES, options, Budget(team))
    team.close()


def costs_of(graph, stages, *factors):
    """Measured costs of stages: the sums of their operators, multiplied by these factors."""
    sums = [sum(graph.nodes[graph.index[name]].forward_s for name in stage) for stage in stages]
    return [StageCosts(f * each, f * each, f * each) for f, each in zip(factors, sums, strict=True)]


def sizes(stages):
    return [len(stage) for stage in stages]


def test_search_returns_the_regular_cut_of_equal_operators(cuts):
    graph = chain(*[1.0] * 8)
    assert cuts.search(graph, 1) == regular_cut(graph, 2)


def test_search_keeps_a_known_cut_that_is_about_as_fast(cuts):
    graph = chain(*[1.0] * 200)
    names = [node.name for node in graph.nodes]
    known = tuple(names[:101]), tuple(names[101:])
    assert regular_cut(graph, 2) != known
    assert cuts.search(graph, 1, known=known) == known
    slow = tuple(names[:150]), tuple(names[150:])
    assert cuts.search(graph, 1, known=slow) == regular_cut(graph, 2)


def test_search_without_a_schedule_for_this_many_stages_raises_the_reason(cuts):
    with pytest.raises(RequestError, match="2 devices with 2 stages each for 2 operators"):
        cuts.search(chain(1.0, 1.0), 2)


def test_corrected_keeps_a_cut_whose_stages_take_the_sums_of_their_operators(cuts):
    graph = chain(*[1.0] * 8)
    stages = regular_cut(graph, 2)
    assert cuts.corrected(graph, stages, costs_of(graph, stages, 1.0, 1.0)) == stages


def test_corrected_moves_operators_out_of_a_stage_that_takes_longer_than_their_sum(cuts):
    graph = chain(*[1.0] * 8)
    stages = regular_cut(graph, 2)
    assert sizes(stages) == [4, 4]
    assert sizes(cuts.corrected(graph, stages, costs_of(graph, stages, 2.0, 1.0))) == [3, 5]


@pytest.mark.parametrize(("memory", "wanted"), [(50, [3, 5]), (49, [4, 4])])
def test_corrected_moves_no_operators_to_a_device_without_memory_for_them(cuts, memory, wanted):
    graph = chain(*[1.0] * 8)
    graph = evolve(graph, nodes=tuple(evolve(node, parameter_bytes=5, state_bytes=10) for node in graph.nodes))
    stages = regular_cut(graph, 2)
    cuts = evolve(cuts, cluster=fully_connected(2, memory, 1e12, 0.0))
    assert sizes(cuts.corrected(graph, stages, costs_of(graph, stages, 2.0, 1.0))) == wanted
