"""A plan is found whenever one microbatch at a time fits, on graphs small enough to try every cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import families
from panpipe.core.search.choose import search_plans
from panpipe.core.search.problem.workload import workload_of
from panpipe.core.search.search_options import SearchOptions

BUDGET = 300


@st.composite
def graphs(draw):
    """A chain with skips, whose operators hold very different amounts."""
    count = draw(st.integers(4, 8))
    size, time = st.integers(0, 50), st.integers(0, 9)
    nodes = tuple(
        OpNode(f"n{i}", draw(time), draw(time), draw(time), 0, 0, draw(size), draw(size), draw(st.integers(0, 20)))
        for i in range(count)
    )
    edges = [OpEdge(f"n{i}", f"n{i + 1}", draw(size)) for i in range(count - 1)]
    skips = draw(st.sets(st.tuples(st.integers(0, count - 3), st.integers(2, count)), max_size=2))
    edges += [OpEdge(f"n{a}", f"n{a + by}", draw(size)) for a, by in skips if a + by < count]
    return OpGraph(nodes, tuple(edges))


def least_memory(graph, devices):
    """The least that the fullest device holds, over all cuts, where a microbatch ends before the next begins."""

    def held(nodes):
        return sum(n.state_bytes + n.saved_bytes for n in nodes) + max(n.workspace_bytes for n in nodes)

    count = len(graph.nodes)
    return min(
        max(held(graph.nodes[a:b]) for a, b in itertools.pairwise((0, *inner, count)))
        for inner in itertools.combinations(range(1, count), devices - 1)
    )


@given(graphs(), st.integers(2, 4), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_plan_is_found_if_one_microbatch_at_a_time_fits(graph, devices, microbatches):
    limit = max(least_memory(graph, devices), 1)
    cluster = fully_connected(devices, limit, 20.0, 0.05)
    options = SearchOptions(families=list(families().values()), max_chunks=2, budget=BUDGET)
    found = search_plans(workload_of(graph, cluster, microbatches), cluster, options).best
    assert max(found.prediction.peak_memory_bytes) <= limit


@pytest.mark.parametrize("spare", [0, 120])
def test_more_memory_keeps_more_microbatches_in_flight(spare):
    graph = OpGraph(
        tuple(OpNode(f"n{i}", 1, 1, 1, state_bytes=10 * (i % 3), saved_bytes=30 + i) for i in range(12)),
        tuple(OpEdge(f"n{i}", f"n{i + 1}", 1) for i in range(11)),
    )
    limit = least_memory(graph, 4)
    cluster = fully_connected(4, limit + spare, 100.0, 0.0)
    options = SearchOptions(families=list(families().values()), budget=2000)
    found = search_plans(workload_of(graph, cluster, 8), cluster, options).best
    serial = 8 * 36
    assert found.prediction.step_s < serial * (0.9 if spare == 0 else 0.6)
