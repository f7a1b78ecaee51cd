"""Where messages share links the judge decides between plans; predictions remain the oracle's."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import plan
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.search_options import SearchOptions
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate

FAMILIES = tuple(map(find_family, ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")))
GRAPH = OpGraph(
    tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, saved_bytes=1) for i in range(8)),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 10) for i in range(7)),
)
ONE_HOST = Cluster(
    tuple(Device(f"gpu{i}", 10**6) for i in range(4)),
    (Hub("pcie", "pcie"), Hub("host", "host")),
    (*(Link(f"gpu{i}", "pcie", 12.0, 0.0) for i in range(4)), Link("pcie", "host", 12.0, 0.0)),
)
"""All messages cross the link to the host."""
OPTIONS = SearchOptions(families=FAMILIES, budget=8000, seed=1)


def test_plan_for_shared_links_is_chosen_by_its_simulated_step():
    alone = plan(GRAPH, ONE_HOST, 6, OPTIONS)
    found = plan(GRAPH, ONE_HOST, 6, evolve(OPTIONS, judge=simulated))
    assert simulate(alone).step_s > 1.01 * alone.predicted.step_s  # messages contend
    assert simulate(found).step_s < simulate(alone).step_s
    score = longest_path(evolve(found, prediction=None), found.predicted.costs, ONE_HOST)
    assert found.predicted.step_s == score.step_s
    assert found.predicted.evaluations > alone.predicted.evaluations
    assert plan(GRAPH, ONE_HOST, 6, evolve(OPTIONS, judge=simulated)) == found


@pytest.mark.parametrize("rate", [1e6, float("inf")])
def test_nothing_is_searched_again_where_no_messages_contend(rate):
    cluster = fully_connected(4, 10**6, rate, 0.0)
    found = plan(GRAPH, cluster, 6, evolve(OPTIONS, judge=simulated))
    alone = plan(GRAPH, cluster, 6, OPTIONS)
    assert (found.hash, found.predicted.step_s) == (alone.hash, alone.predicted.step_s)
    assert found.predicted.evaluations < OPTIONS.budget  # the rest was for a search with contention
