"""Speeds of devices from their profiles, and plans for devices of different speeds."""

import pytest
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.choose import plan, plan_for_devices
from panpipe.core.search.search_options import SearchOptions
from panpipe.runtimes.replan.replanner import slowed, slowness, step_s_on

NODES, DEVICES, MICROBATCHES = 12, 2, 8
GRAPH = OpGraph(
    tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, 0.1, parameter_bytes=4, state_bytes=12, saved_bytes=8) for i in range(NODES)),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 4) for i in range(NODES - 1)),
)
CLUSTER = fully_connected(DEVICES, 10**9, float("inf"), 0.0)
OPTIONS = SearchOptions(families=(find_family("1f1b"),), anneal=False, max_chunks=1, budget=2000)
PLAN = plan(GRAPH, CLUSTER, MICROBATCHES, OPTIONS)
COSTS = PLAN.predicted.costs


def test_slowness_is_relative_to_the_fastest_device():
    assert slowness([slowed(GRAPH, 2.0), slowed(GRAPH, 5.0)], 2) == pytest.approx((1.0, 2.5))


def test_devices_that_differ_by_noise_are_equally_fast():
    assert slowness([GRAPH, slowed(GRAPH, 1.05)], 2) == (1.0, 1.0)


def test_slowest_replica_counts():
    assert slowness([GRAPH, GRAPH, GRAPH, slowed(GRAPH, 3.0)], 2) == pytest.approx((1.0, 3.0))


@pytest.mark.parametrize("slow", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0)])
def test_plan_gives_slow_devices_fewer_operators(slow):
    graphs = [slowed(GRAPH, factor) for factor in slow]
    found = plan_for_devices(graphs, CLUSTER, MICROBATCHES, OPTIONS)
    sizes = [len(stage.nodes) for stage in found.stages]
    assert sizes == {(1.0, 3.0): [9, 3], (3.0, 1.0): [3, 9], (1.0, 1.0): [6, 6]}[slow]


def test_prediction_on_slowed_devices_is_that_of_the_search():
    devices = [slowed(GRAPH, factor) for factor in (1.0, 3.0)]
    found = plan_for_devices(devices, CLUSTER, MICROBATCHES, OPTIONS)
    assert step_s_on(devices, found, FREE, longest_path) == pytest.approx(found.predicted.step_s)
    assert step_s_on(devices, PLAN, FREE, longest_path) > 1.5 * found.predicted.step_s
