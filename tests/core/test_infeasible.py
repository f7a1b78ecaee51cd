"""The smallest changes with which a plan fits: what is tried, in which order, and what is said of it."""

import pytest
from attrs import evolve
from panpipe.core.cluster import Cluster, Device, Hub, Link, fully_connected
from panpipe.core.costs import StageCosts
from panpipe.core.graph import OpEdge, OpGraph, OpNode
from panpipe.core.planner.infeasible import NothingFits, enlarged, excess, holding, smaller, smallest_changes
from panpipe.simulators.run import simulate

from ..support.plans import scheduled

GRAPH = OpGraph(
    tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0, state_bytes=10, saved_bytes=5, workspace_bytes=3) for i in range(40)),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 9) for i in range(39)),
)
COST = StageCosts(1.0, 1.0, 1.0, parameter_bytes=40, gradient_bytes=40, saved_bytes=100, workspace_bytes=7)


def nothing(*limits: float) -> NothingFits:
    """1F1B on two devices, which holds 287 and 187 bytes."""
    plan = scheduled("1f1b", 2, 4, costs=[COST] * 2, cluster=fully_connected(2, 400, 1.0, 0.0))
    peaks = simulate(plan, memory=True).peak_memory_bytes
    peaks = tuple(max(t.moving[0] + t.moving[2]) + sum(t.state) for t in simulate(plan).timelines)
    assert peaks == (287, 187)
    plan = evolve(plan, prediction=evolve(plan.prediction, peak_memory_bytes=peaks))
    return NothingFits("it does not fit", plan, limits)


def changes(lacking: NothingFits, fits, rows=None):
    """Changes where a plan is found as ``fits(devices, microbatches)`` says, and the problems that were tried."""
    tried = []

    def replan(graph, cluster, microbatches):
        tried.append((len(cluster.devices), microbatches, graph.nodes[0].saved_bytes))
        return lacking.closest if fits(len(cluster.devices), microbatches) else None

    found = smallest_changes(lacking, GRAPH, simulate(lacking.closest).timelines, replan, rows=rows)
    return {change.what: change.value for change in found}, tried


def test_the_device_that_lacks_most():
    lacking = nothing(250, 100)
    held = holding(lacking, simulate(lacking.closest).timelines)
    assert excess(lacking) == (37, 87)
    assert (held.device, str(held.action), held.bytes, held.limit) == (1, "1F0", 187, 100)
    assert held.kinds == {"parameters": 40, "gradients": 40, "optimizer": 0, "saved": 100, "workspace": 7}


def test_devices_are_doubled_and_then_halved_down():
    found, tried = changes(nothing(250, 250), lambda devices, _: devices >= 5)
    assert found["more devices"] == 5
    assert [devices for devices, microbatches, _ in tried if microbatches == 4] == [4, 8, 6, 5]


def test_microbatches_are_halved_as_long_as_they_have_rows():
    fits = lambda devices, microbatches: microbatches >= 16  # noqa: E731
    found, tried = changes(nothing(250, 250), fits, rows=16)
    assert found["smaller microbatches"] == 16
    assert [each for each in tried if each[1] > 4] == [(2, 8, 3), (2, 16, 2)]
    assert "smaller microbatches" not in changes(nothing(250, 250), fits, rows=8)[0]


def test_what_cannot_fit_is_not_tried():
    found, tried = changes(nothing(187, 187), lambda *_: True)
    assert found["more devices"] == 3  # all operators hold 400 bytes of state: two devices of 187 never suffice
    assert [each for each in tried if each[0] == 2] == []


def test_offload_leaves_a_microbatch_to_work_on():
    assert changes(nothing(250, 187), lambda *_: False)[0] == {"offload": 37, "more memory": 37}
    assert changes(nothing(187, 187), lambda *_: False)[0] == {"offload": 100, "more memory": 100}
    assert changes(nothing(186, 187), lambda *_: False)[0] == {"more memory": 101}


def test_further_devices_are_linked_like_the_last():
    direct = enlarged(fully_connected(2, 10, 5.0, 0.5), 4)
    assert [device.name for device in direct.devices] == ["device0", "device1", "device2", "device3"]
    assert {(a, b): direct.transfer_s(a, b, 10) for a in range(4) for b in range(4) if a != b} == dict.fromkeys(
        ((a, b) for a in range(4) for b in range(4) if a != b), 2.5
    )
    links = (Link("a", "hub", 5.0, 0.25), Link("device2", "hub", 5.0, 0.25))
    switched = enlarged(Cluster((Device("a", 10), Device("device2", 20, None)), (Hub("hub"),), links), 3)
    assert switched.devices[2] == Device("device2+", 20)
    assert switched.transfer_s(0, 2, 10) == pytest.approx(2.5)


def test_a_smaller_graph_costs_less_and_holds_the_same_state():
    half = smaller(GRAPH, 2)
    assert half.nodes[0] == OpNode("n0", 0.5, 0.5, 0.5, state_bytes=10, saved_bytes=3, workspace_bytes=2)
    assert half.edges[0].bytes == 5
