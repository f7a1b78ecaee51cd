"""Graphs and clusters as arrays, literally."""

from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import MessageLine
from panpipe.core.search.problem.arrays import GRADIENT_BYTES, OPTIMIZER, SAVED, STATE, graph_arrays, machine_arrays

NODES = (
    OpNode("a", 1, 2, 3, workspace_bytes=5, saved_bytes=7, parameter_bytes=10, state_bytes=40, optimizer_s=4.0,
           parameters=("w",)),
    OpNode("b", 10, 20, 30, workspace_bytes=9),
    OpNode("c", 100, 200, 300, workspace_bytes=1, saved_bytes=70, parameters=("w",)),
)  # fmt: skip
EDGES = (OpEdge("a", "b", 8), OpEdge("a", "c", 6), OpEdge("b", "c", 4, False), OpEdge("a", "c", 3, True, 1))


def test_graph_arrays_are_prefix_sums():
    sums = graph_arrays([OpGraph(NODES, EDGES)]).sums[0]
    assert sums[:3].tolist() == [[0, 1, 11, 111], [0, 2, 22, 222], [0, 3, 33, 333]]
    assert [sums[row].tolist() for row in (OPTIMIZER, STATE, SAVED, GRADIENT_BYTES)] == [
        [0, 4, 4, 4], [0, 40, 40, 40], [0, 7, 7, 77], [0, 10, 10, 10],
    ]  # fmt: skip


def test_graph_arrays_have_the_largest_workspace_of_each_power_of_two():
    largest = graph_arrays([OpGraph(NODES, EDGES)]).largest[0]
    assert largest[0].tolist() == [5, 9, 1]
    assert largest[1, :2].tolist() == [9, 9]


def test_graph_arrays_list_each_tensors_readers_once_with_its_gradient():
    found = graph_arrays([OpGraph(NODES, EDGES)])
    tensors = [
        (int(source), [(int(found.reader[r]), found.size[r], found.back[r]) for r in range(*found.first[i : i + 2])])
        for i, source in enumerate(found.source)
    ]
    assert tensors == [(0, [(1, 8, 8), (2, 6, 6)]), (0, [(2, 3, 3)]), (1, [(2, 4, 0)])]


def test_graph_arrays_list_the_readers_of_parameters_that_several_nodes_read():
    found = graph_arrays([OpGraph(NODES, EDGES)])
    assert (found.shared_first.tolist(), found.shared_reader.tolist()) == ([0, 2], [0, 2])
    assert (found.shared_size.tolist(), found.shared_gradient.tolist()) == ([40.0], [10.0])


def test_machine_arrays_have_the_farthest_replicas_path_between_two_positions():
    links = (Link("d0", "d1", 10.0, 1.0), Link("d2", "d3", 5.0, 2.0), Link("d0", "d2", 10.0, 0.0))
    cluster = Cluster(tuple(Device(f"d{i}", 10**6, forwards=True) for i in range(4)), (), links)
    found = machine_arrays(cluster, ((0, 1), (2, 3)), (8.0, 9.0), (0, 0), MessageLine(0.5, 0.25))
    assert found.latency[0, 1] == 2.0
    assert found.rate[0, 1] == 5.0
    assert found.limits.tolist() == [8.0, 9.0]
    assert found.message.tolist() == [0.5, 0.25]
