"""The cuts of a measured model: a regular one, and another one if it gains enough."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE
from panpipe.core.errors import RequestError
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.suggestions.regular_cuts import regular_cut
from panpipe.runtimes.launch.team import ThreadTeam
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
    yield CutSearch(measured, fully_connected(2, 10**12, 1e12, 0.0), MICROBATCHES, options, 2000)
    team.close()


def sizes(stages):
    return [len(stage) for stage in stages]


def test_search_returns_the_regular_cut_of_equal_operators(cuts):
    graph = chain(*[1.0] * 8)
    assert cuts.search(graph, 1) == [regular_cut(graph, 2)]


def test_search_without_a_schedule_for_this_many_stages_raises_the_reason(cuts):
    with pytest.raises(RequestError, match="2 devices with 2 stages each for 2 operators"):
        cuts.search(chain(1.0, 1.0), 2)


def test_faster_cut_is_searched_in_addition_to_the_regular_one(cuts):
    """Its boundary sends more bytes than one nearby."""
    graph = chain(*[1.0] * 4, 4.0)
    edges = tuple(evolve(edge, bytes=1 if number == 1 else 2) for number, edge in enumerate(graph.edges))
    regular, searched = cuts.search(evolve(graph, edges=edges), 1)
    assert sizes(regular) == [2, 3]
    assert sizes(searched) == [4, 1]


def test_cut_that_does_not_fit_in_memory_is_not_taken(cuts):
    graph = chain(*[1.0] * 4, 4.0)
    nodes = tuple(
        evolve(n, parameter_bytes=s, state_bytes=s) for n, s in zip(graph.nodes, [1, 1, 1, 1, 9], strict=True)
    )
    edges = tuple(evolve(edge, bytes=1 if number == 1 else 2) for number, edge in enumerate(graph.edges))
    cuts = evolve(cuts, cluster=fully_connected(2, 10, 1e12, 0.0))
    (only,) = cuts.search(evolve(graph, nodes=nodes, edges=edges), 1)
    assert sizes(only) == [4, 1]
