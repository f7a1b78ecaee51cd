"""Fewer devices are suggested if they are faster alone."""

from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import search_plans
from panpipe.core.search.problem.workload import workload_of
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.search.suggestions.fewer_devices import faster_alone


def alone(latency_s, devices=4):
    nodes = tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0) for i in range(8))
    graph = OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 1) for i in range(7)))
    cluster = fully_connected(devices, 1000, 1e9, latency_s)
    tried = []

    def search(count):
        tried.append(count)
        options = SearchOptions(families=[find_family("1f1b")], budget=100)
        return search_plans(workload_of(graph, cluster, 4), cluster, options, meshes=[(count, 1)]).best

    return faster_alone(search(devices), search), tried


def test_one_device_is_faster_alone_if_messages_take_longer_than_computing():
    found, tried = alone(1000.0)
    assert (found.devices, found.prediction.step_s) == (1, 4 * 8 * 3.0)
    assert tried == [4, 2, 1]


def test_numbers_of_devices_that_could_not_be_faster_are_not_searched():
    found, tried = alone(0.0)
    assert (found, tried) == (None, [4])
