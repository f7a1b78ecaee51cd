"""Cuts that send less, where the balance allows it: nearby, and by what messages cost their ends."""

import pytest
from panpipe.core.cluster import fully_connected
from panpipe.core.graph import OpEdge, OpGraph, OpNode
from panpipe.core.message_times import FREE, MessageLine
from panpipe.core.planner.choose import plan
from panpipe.core.planner.thinner import thinner_cut
from panpipe.core.schedules.registry import find_family


def chain(*seconds_and_bytes: tuple[float, int]) -> OpGraph:
    """Operators in a row, with the seconds of each and the bytes that it hands on."""
    nodes = tuple(OpNode(f"n{i}", s, s, s) for i, (s, _) in enumerate(seconds_and_bytes))
    edges = tuple(OpEdge(f"n{i}", f"n{i + 1}", size) for i, (_, size) in enumerate(seconds_and_bytes[:-1]))
    return OpGraph(nodes, edges)


def stages(*counts: int) -> tuple[tuple[str, ...], ...]:
    found, first = [], 0
    for count in counts:
        found.append(tuple(f"n{i}" for i in range(first, first + count)))
        first += count
    return tuple(found)


def test_the_thinnest_of_those_that_are_balanced_is_taken():
    graph = chain((10, 1), (10, 8), (10, 1), (10, 0))
    assert thinner_cut(graph, stages(2, 2), (0, 1)) is None  # those that send less leave a device half as much again
    graph = chain((10, 3), (0.1, 8), (0.1, 4), (10, 0))
    assert thinner_cut(graph, stages(2, 2), (0, 1)) == stages(1, 3)


def test_what_saves_less_than_a_fifth_is_not_worth_it():
    assert thinner_cut(chain((1, 10), (0.01, 9), (1, 0)), stages(1, 2), (0, 1)) is None
    assert thinner_cut(chain((1, 10), (0.01, 8), (1, 0)), stages(1, 2), (0, 1)) == stages(2, 1)


def test_what_stays_on_a_device_costs_nothing():
    graph = chain((1, 10), (0.01, 1), (1, 0))
    assert thinner_cut(graph, stages(1, 2), (0, 0)) is None


def test_a_cut_moves_three_operators_at_most_and_leaves_no_stage_empty():
    graph = chain((1, 10), *[(0.001, 10)] * 3, (0.001, 1), (1, 0))
    assert thinner_cut(graph, stages(1, 5), (0, 1)) is None
    assert thinner_cut(graph, stages(2, 4), (0, 1)) == stages(5, 1)
    assert thinner_cut(chain((1, 10), (1, 0)), stages(1, 1), (0, 1)) is None


@pytest.mark.parametrize(("message", "first"), [(FREE, {2}), (MessageLine(0.0, 0.1), {1, 3})])
def test_the_search_counts_what_messages_cost_their_ends(message, first):
    graph = chain((10, 1), (1, 40), (1, 1), (10, 0))
    cluster = fully_connected(2, 10**9, 1e9, 0.0)
    found = plan(graph, cluster, 8, families=[find_family("1f1b")], budget=2000, max_chunks=1, message=message)
    assert len(found.stages[0].nodes) in first
