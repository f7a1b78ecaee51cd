"""The exact search of the test tool, against all orders of a few actions."""

import importlib
import random
import sys
from pathlib import Path

import pytest
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode

from ..support.orders.by_trial import fastest_by_trial

MOST = 10_000
pytestmark = pytest.mark.slow  # compiling the search takes half a minute


@pytest.fixture(scope="module")
def planning():
    """The modules of the tool, by name."""
    before = list(sys.path)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    yield lambda name: importlib.import_module(f"benchmarks.planning.{name}")
    sys.path[:] = before


def case_of(planning, seed):
    """A case of three operators with two microbatches, on two devices whose memory may be short."""
    draw = random.Random(seed)
    nodes = tuple(
        OpNode(
            f"n{i}", draw.randint(1, 9), draw.randint(1, 9), draw.randint(0, 9), 0.0, 0, state_bytes=draw.randint(0, 5),
            saved_bytes=draw.randint(1, 9), workspace_bytes=draw.randint(0, 5),
        )
        for i in range(3)
    )  # fmt: skip
    edges = [OpEdge("n0", "n1", draw.randint(0, 4)), OpEdge("n1", "n2", draw.randint(0, 4))]
    graph, limit = OpGraph(nodes, tuple(edges)), draw.choice([30, 40, 10**6])
    return planning("small_cases").Case(f"{seed}", graph, fully_connected(2, limit, 1.0, 1.0), 2, 1, limit)


@pytest.mark.parametrize("seed", range(12))
def test_search_finds_an_order_exactly_where_one_exists(planning, seed):
    placed = planning("placed").Placed(case_of(planning, seed), [(0, 1, 0), (0, 1, 1), (0, 0, 1)][seed % 3])
    least = fastest_by_trial(
        placed.times, placed.device_of, placed.edges, placed.saved, placed.workspace, placed.spare, placed.count
    )
    search = planning("order_search").OrderSearch(placed)
    if least == float("inf"):
        assert search.order_within(1000, MOST).step_s is None
    else:
        assert placed.bound_s <= least
        assert search.order_within(least, MOST).step_s == least
        below = search.order_within(least - 1, MOST)
        assert below.step_s is None
        assert below.complete


def test_search_without_enough_space_gives_no_proof(planning):
    case = planning("small_cases").case_of(15)
    placed = planning("exact").candidates(case, 1562)[0]
    search = planning("order_search").OrderSearch(placed)
    assert search.order_within(1562, MOST).complete
    assert not search.order_within(1562, 1).complete


@pytest.mark.parametrize("number", [73, 20])  # with short and with ample memory; not all graphs (results/exhaustive.md)
def test_planner_finds_the_optimum_of_these_small_graphs(planning, number):
    row, answer = planning("exhaustive").compared(planning("small_cases").case_of(number), 0, MOST)
    assert answer == "near", row
