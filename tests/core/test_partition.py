"""Partition: the ranges' tables, the optimum against brute force, and what is said when nothing fits."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster import fully_connected
from panpipe.core.costs import stage_costs, stage_edges
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.graph import OpEdge, OpGraph, OpNode
from panpipe.core.partition import (
    PartitionProblem,
    RangeTables,
    device_limits,
    in_flight_1f1b,
    partition,
    round_robin,
    stages_of,
)
from panpipe.core.partition.held import device_times, held

RATE, LATENCY = 4.0, 0.5


@st.composite
def graphs(draw, most=8):
    size = draw(st.integers(3, most))
    number = st.integers(0, 9)
    nodes = tuple(
        OpNode(
            f"n{i}",
            forward_s=draw(number),
            backward_input_s=draw(number),
            backward_weight_s=draw(number),
            parameter_bytes=draw(number),
            state_bytes=draw(number) + 9,
            saved_bytes=draw(number),
            workspace_bytes=draw(number),
        )
        for i in range(size)
    )
    pairs = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=10))
    sizes = draw(st.lists(number, min_size=size, max_size=size))
    edges = tuple(
        OpEdge(f"n{min(a, b)}", f"n{max(a, b)}", sizes[min(a, b)], draw(st.booleans())) for a, b in pairs if a != b
    )
    return OpGraph(nodes, edges)


def every_cut(size, stages):
    return [(0, *inner, size) for inner in itertools.combinations(range(1, size), stages - 1)]


def stage_time(graph, stages, index):
    """The stated model, from the graph itself."""
    cost = stage_costs(graph, stages)[index]
    edges = [edge for edge in stage_edges(graph, stages) if edge.dst == index]
    compute = cost.forward_s + cost.backward_input_s + cost.backward_weight_s
    moved = (sum(e.bytes for e in edges), sum(e.gradient_bytes for e in edges))
    return max([compute] + [LATENCY + size / RATE for size in moved if size])


def memory(graph, stages, index, flight):
    cost = stage_costs(graph, stages)[index]
    return cost.state_bytes + flight[index] * cost.saved_bytes + cost.workspace_bytes


def moved_bytes(graph, stages):
    return sum(edge.bytes + edge.gradient_bytes for edge in stage_edges(graph, stages))


@given(graphs(), st.integers(1, 3), st.integers(1, 4), st.integers(10, 150))
def test_one_stage_a_device_is_optimal_for_time_then_bytes(graph, devices, microbatches, limit):
    flight = in_flight_1f1b(devices, microbatches)
    cluster = fully_connected(devices, limit, RATE, LATENCY)
    problem = PartitionProblem(RangeTables(graph), cluster, round_robin(devices), flight, device_limits(cluster))
    possible, least_need = [], math.inf
    for cuts in every_cut(len(graph.nodes), devices):
        stages = stages_of(graph, cuts)
        need = max(memory(graph, stages, i, flight) for i in range(devices))
        least_need = min(least_need, need)
        if need <= limit:
            slowest = max(stage_time(graph, stages, i) for i in range(devices))
            possible.append((slowest, moved_bytes(graph, stages)))
    if not possible:
        with pytest.raises(InfeasibleError, match=rf"{least_need:.0f} in all"):
            partition(problem)
        return
    stages = stages_of(graph, partition(problem))
    found = max(stage_time(graph, stages, i) for i in range(devices)), moved_bytes(graph, stages)
    assert found == pytest.approx(min(possible))


@given(graphs(), st.integers(1, 3), st.integers(1, 3))
def test_tables_say_what_stages_cost_and_receive(graph, devices, chunks):
    stages = devices * chunks
    if stages > len(graph.nodes):
        return
    tables = RangeTables(graph)
    for cuts in every_cut(len(graph.nodes), stages)[:20]:
        names = stages_of(graph, cuts)
        edges = stage_edges(graph, names)
        for index, cost in enumerate(stage_costs(graph, names)):
            at = cuts[index + 1], cuts[index]
            assert tables.compute_s[at] == cost.forward_s + cost.backward_input_s + cost.backward_weight_s
            assert tables.state_bytes[at] == cost.state_bytes
            assert tables.saved_bytes[at] == cost.saved_bytes
            assert tables.workspace_bytes[at] == cost.workspace_bytes
            assert tables.received_bytes[at] == sum(e.bytes for e in edges if e.dst == index)
            assert tables.returned_bytes[at] == sum(e.gradient_bytes for e in edges if e.dst == index)


@given(graphs(9), st.integers(2, 3))
def test_several_stages_a_device_leave_no_single_cut_that_helps(graph, devices):
    if 2 * devices > len(graph.nodes):
        return
    cluster = fully_connected(devices, 10**6, RATE, LATENCY)
    placement = round_robin(devices, 2)
    problem = PartitionProblem(RangeTables(graph), cluster, placement, (1.0,) * len(placement), device_limits(cluster))
    cuts = partition(problem)
    assert cuts == tuple(sorted(set(cuts)))
    slowest = max(device_times(problem, cuts))
    for cut in range(1, len(cuts) - 1):
        for place in range(cuts[cut - 1] + 1, cuts[cut + 1]):
            other = (*cuts[:cut], place, *cuts[cut + 1 :])
            assert max(device_times(problem, other)) >= slowest - 1e-6


def chain(times, **costs):
    nodes = tuple(OpNode(f"n{i}", forward_s=time, **costs) for i, time in enumerate(times))
    return OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 8) for i in range(len(times) - 1)))


def problem_of(graph, devices, memory_bytes, chunks=1, flight=1.0):
    cluster = fully_connected(devices, memory_bytes, 1e9, 0.0)
    placement = round_robin(devices, chunks)
    return PartitionProblem(RangeTables(graph), cluster, placement, (flight,) * len(placement), device_limits(cluster))


def test_memory_moves_the_cut_away_from_the_fastest():
    graph = chain([1.0, 1.0, 1.0, 1.0], state_bytes=10, saved_bytes=10)
    even = problem_of(graph, 2, 80)
    assert partition(even) == (0, 2, 4)
    cluster = even.cluster
    tight = PartitionProblem(even.tables, cluster, (0, 1), (3.0, 1.0), (79.0, 79.0))
    assert partition(tight) == (0, 1, 4)


def test_memory_holds_with_several_stages_a_device():
    graph = chain([1.0] * 8, saved_bytes=10)
    uneven = OpGraph(
        tuple(OpNode(n.name, forward_s=1.0, saved_bytes=30 if i == 0 else 10) for i, n in enumerate(graph.nodes)),
        graph.edges,
    )
    problem = problem_of(uneven, 2, 50, chunks=2)
    assert [need.bytes for need in held(problem, partition(problem))] == [50, 50]


def test_a_heavy_last_operator_leaves_its_device_little_else():
    problem = problem_of(chain([1.0] * 12 + [6.0]), 2, 10**6, chunks=2)
    assert device_times(problem, partition(problem)) == pytest.approx((9.0, 9.0))


def test_infeasible_names_device_kinds_and_change():
    problem = problem_of(chain([1.0] * 4, state_bytes=10, saved_bytes=20, workspace_bytes=5), 2, 60, flight=2.0)
    with pytest.raises(InfeasibleError) as caught:
        partition(problem)
    assert str(caught.value) == (
        "device 0 ('device0') needs 105 bytes and may hold 60: 20 of parameters, gradients and optimizer state, "
        "80 of saved tensors (2 microbatches in flight), 5 of workspace; the smallest change that fits is "
        "45 bytes more a device, 105 in all"
    )


def test_more_stages_than_operators():
    with pytest.raises(RequestError, match=r"4 stages on 2 devices for 3 operators: .*fewer devices or chunks"):
        problem_of(chain([1.0] * 3), 2, 100, chunks=2)


def test_a_device_without_stage_is_refused():
    graph = chain([1.0] * 3)
    cluster = fully_connected(2, 100, 1.0, 0.0)
    with pytest.raises(RequestError, match=r"devices \[0\] of 2"):
        PartitionProblem(RangeTables(graph), cluster, (0, 0), (1.0, 1.0), device_limits(cluster))


def test_a_memory_limit_is_above_zero_and_never_above_the_device():
    cluster = fully_connected(2, 100, 1.0, 0.0)
    assert device_limits(cluster, 50) == (50, 50)
    assert device_limits(cluster, 500) == (100, 100)
    with pytest.raises(RequestError, match="-1"):
        device_limits(cluster, -1)


def test_two_thousand_operators_are_cut_for_64_devices():
    graph = chain([1.0 + (i * 7919 % 13) for i in range(2000)], saved_bytes=1)
    assert len(partition(problem_of(graph, 64, 10**6))) == 65
