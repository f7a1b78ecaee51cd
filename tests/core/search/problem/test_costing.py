"""Costs of stages and edges as arrays, literally: of cuts, and of stages with given costs."""

import numpy as np
import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE, MessageLine
from panpipe.core.search.problem.arrays import graph_arrays, machine_arrays
from panpipe.core.search.problem.costing import cost_stages, fill_fixed
from panpipe.core.timing.coding import BOTH, FORWARD
from panpipe.core.timing.compiled import START, make_stage_arrays

NODES = (
    OpNode("a", 1, 2, 3, workspace_bytes=5, saved_bytes=7, parameter_bytes=10, state_bytes=40, optimizer_s=4.0,
           parameters=("w",)),
    OpNode("b", 10, 20, 30, workspace_bytes=9),
    OpNode("c", 100, 200, 300, workspace_bytes=1, saved_bytes=70, parameters=("w",)),
)  # fmt: skip
EDGES = (OpEdge("a", "b", 8), OpEdge("a", "c", 6), OpEdge("b", "c", 4, False), OpEdge("a", "c", 3, False, 1))
GRAPH = graph_arrays([OpGraph(NODES, EDGES)])
LINE = MessageLine(0.5, 0.25)


def machine(message=FREE, replicas=((0, 1),)):
    cluster = fully_connected(4, 10**6, 10.0, 1.0)
    return machine_arrays(cluster, replicas, (1e6, 1e6), (0, 0), message)


def cut(cuts, placement, recompute=None, graph=GRAPH, **options):
    """The arrays of the stages between these cuts."""
    stages = len(placement)
    out = make_stage_arrays(stages, 4)
    again = np.array(recompute or [False] * stages)
    cost_stages(graph, machine(**options), np.array(placement), np.array(cuts), again, out)
    return out


def edges(out, stages):
    """Reader, source and delay of every edge, forward and back."""
    return [
        [(s, int(sources[e]), float(delays[e])) for s in range(stages) for e in range(first[s], first[s + 1])]
        for first, sources, delays in (
            (out.forward_first, out.forward_from, out.forward_delay), (out.back_first, out.back_from, out.back_delay),
        )
    ]  # fmt: skip


def test_stages_of_cuts_have_the_sums_of_their_operators():
    out = cut((0, 1, 3), (0, 1))
    assert out.times.tolist() == [[1, 110], [2, 220], [3, 330], [5, 550]]
    assert (out.optimizer.tolist(), out.workspace.tolist()) == ([4, 0], [5, 9])
    assert out.after_forward.tolist() == [7, 70]
    assert (out.second_forward.tolist(), out.reduce.tolist()) == ([0, 0], [0, 0])


def test_only_gradients_of_trained_parameters_are_reduced():
    frozen = OpNode("frozen", parameter_bytes=100, state_bytes=100, shared_bytes=50)
    trained = OpNode("trained", parameter_bytes=10, state_bytes=40)
    both, alone = (
        cut((0, len(nodes)), (0,), graph=graph_arrays([OpGraph(nodes)]), replicas=((0, 1), (2, 3))).reduce.tolist()
        for nodes in ((frozen, trained), (trained,))
    )
    assert both == alone != [0]
    found = cut((0, 1), (0,), graph=graph_arrays([OpGraph((frozen,))]), replicas=((0, 1), (2, 3)))
    assert found.reduce.tolist() == [0]


def test_copy_of_a_parameter_that_two_stages_read_counts_in_the_later_one():
    # State of 40 bytes for 10 of parameters: with its gradient and its share of the optimizer state a copy takes 40.
    assert cut((0, 1, 3), (0, 1)).state.tolist() == [40, 40]
    assert cut((0, 2, 3), (0, 1)).state.tolist() == [40, 40]
    assert cut((0, 3), (0,)).state.tolist() == [40]


def test_copy_of_a_frozen_parameter_has_no_gradient():
    first = evolve(NODES[0], state_bytes=10, trained_bytes=0, frozen=("w",))
    graph, replicas = graph_arrays([OpGraph((first, *NODES[1:]), EDGES)]), ((0, 1), (2, 3))
    out = cut((0, 1, 3), (0, 1), graph=graph, replicas=replicas)
    assert (out.state.tolist(), out.reduce.tolist()) == ([10, 10], [0, 0])


def test_each_tensor_goes_once_to_each_later_stage_and_back_where_it_has_a_gradient():
    # Of a's first tensor the larger of two readings, and a's second tensor, which has no gradient.
    assert edges(cut((0, 1, 3), (0, 1)), 2) == [[(1, 0, pytest.approx(1 + 1.1))], [(0, 1, pytest.approx(1.8))]]
    forward, back = edges(cut((0, 1, 2, 3), (0, 1, 0)), 3)
    # Stages 0 and 2 are on one device: their message takes no time. b sends c 4 bytes without a gradient.
    assert forward == [(1, 0, pytest.approx(1.8)), (2, 0, 0.0), (2, 1, pytest.approx(1.4))]
    assert back == [(0, 1, pytest.approx(1.8)), (0, 2, 0.0)]


def test_stage_that_recomputes_holds_what_it_receives_and_runs_its_forward_again():
    out = cut((0, 1, 3), (0, 1), recompute=[False, True])
    assert out.second_forward.tolist() == [0, 110]
    assert out.after_forward.tolist() == [7, 11]
    assert out.second_forward_bytes.tolist() == [0, 59]


def test_message_takes_time_of_both_of_its_devices():
    free, out = cut((0, 1, 3), (0, 1)), cut((0, 1, 3), (0, 1), message=LINE)
    there, back = 0.5 + 11 * 0.25, 0.5 + 8 * 0.25
    assert (out.times - free.times).tolist() == [[there, there], [back, back], [0, 0], [back, back]]
    alone = cut((0, 1, 3), (0, 0), message=LINE)
    assert alone.times.tolist() == free.times.tolist()  # it stays on its device


def test_gradients_are_reduced_over_replicas_with_those_of_copies():
    found = machine(replicas=((0, 1), (2, 3)))
    out = cut((0, 1, 3), (0, 1), replicas=((0, 1), (2, 3)))
    assert out.reduce.tolist() == pytest.approx([(found.reduce[0, 0] + 10 * found.reduce[1, 0])] * 2)
    assert cut((0, 1, 2, 3), (0, 1, 0), replicas=((0, 1), (2, 3))).reduce[1] == 0.0  # b has no parameters


def test_given_stages_keep_their_costs():
    cost = StageCosts(1.0, 2.0, 3.0, 4.0, 5.0, 10, 20, 30, 100, 40, 6, 7, 0.5, 11)
    placement = np.array([0, 1, 0])
    out = make_stage_arrays(3, 2)
    given = (StageEdge(1, 2, 20, 0), StageEdge(0, 1, 10, 30))
    fill_fixed([cost] * 3, given, placement, np.array([False, True, False]), machine(), out)
    assert out.times.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3]
    assert out.second_forward.tolist() == [0.0, 0.5, 0.0]
    assert (out.optimizer[0], out.state[0], out.workspace[0]) == (5.0, 60, 7)
    assert out.saved[START, FORWARD].tolist() == [100, 11, 100]
    assert out.saved[START, BOTH].tolist() == [0, 89, 0]
    assert out.after_input.tolist() == [66, 66, 66]
    assert edges(out, 3) == [[(1, 0, 2.0), (2, 1, 3.0)], [(0, 1, 4.0)]]
