"""The dependency graph of a lowered plan, its order and its cycles."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.plan.derive import forward_only
from panpipe.core.plan.lowering import lower
from panpipe.core.plan.queues import queues_of
from panpipe.core.plan.validation.progress import DependencyGraph, dependency_graph, topological_order

from ....support.plans import orders, plan_of, scheduled

ONE = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
ONE_LOWERED = orders("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP")


def by_name(graph):
    """Name of a node → name and reason of everything that it waits for."""
    names = graph.names
    return {name: {(names[at], why) for at, why in before} for name, before in zip(names, graph.before, strict=True)}


def test_graph_has_order_messages_and_what_they_wait_for():
    graph = dependency_graph(ONE, queues_of(ONE, ONE_LOWERED))
    assert by_name(graph) == {
        "0F0": set(),
        "0B0": {("0F0", "runs after it"), ("1SEND_B0>0", "reads its output")},
        "0STEP": {("0B0", "runs after it")},
        "1F0": {("0SEND_F0>1", "reads its output")},
        "1B0": {("1F0", "runs after it")},
        "1STEP": {("1B0", "runs after it")},
        "0SEND_F0>1": {("0F0", "sends its output")},
        "1SEND_B0>0": {("1B0", "sends its output"), ("0F0", "its receive is posted after it")},
    }
    assert graph.first_operation == [0, 3]
    assert graph.first_message == {(0, 1): 6, (1, 0): 7}


def test_stages_of_one_device_wait_for_each_other_without_a_message():
    plan = plan_of(orders("0F0 1F0 1B0 0B0"), (0, 0))
    found = by_name(dependency_graph(plan, queues_of(plan, lower(plan))))
    assert ("0F0", "reads its output") in found["1F0"]
    assert ("1B0", "reads its output") in found["0B0"]


def test_messages_of_a_queue_follow_each_other_and_forwards_wait_where_a_limit_says_so():
    plan = forward_only(scheduled("gpipe", 2, 3))
    queues = queues_of(plan, lower(plan, 0))
    free, limited = (
        by_name(dependency_graph(plan, queues)),
        by_name(dependency_graph(plan, queues, lambda stage, reader: 1)),
    )
    assert ("0SEND_F0>1", "is next in the queue") in free["0SEND_F1>1"]
    added = {name: limited[name] - free[name] for name in free if limited[name] != free[name]}
    why = "may not run further ahead of it"
    assert added == {"0F1": {("0SEND_F0>1", why)}, "0F2": {("0SEND_F1>1", why)}}


def test_order_has_everything_after_what_it_waits_for():
    plan = scheduled("1f1b", 3, 4)
    graph = dependency_graph(plan, queues_of(plan, lower(plan)))
    order = topological_order(graph)
    assert sorted(order) == list(range(len(graph.names)))
    place = {node: at for at, node in enumerate(order)}
    assert all(place[other] < place[node] for node, before in enumerate(graph.before) for other, _ in before)


@pytest.mark.parametrize("turn", range(3))
def test_cycle_is_reported_with_consecutive_actions_of_a_device_joined(turn):
    reasons = ["reads its output", "runs after it", "runs after it"]
    graph = DependencyGraph(["a", "b", "c", "apart"])
    for node in range(3):
        graph.before.append([((node + 2) % 3, reasons[(node + turn) % 3])])
    graph.before.append([(0, "runs after it")])
    with pytest.raises(RequestError) as error:
        topological_order(graph)
    said = str(error.value).removeprefix("the plan deadlocks: ").removesuffix("; change the order of one of them")
    reader = "abc"[-turn % 3]  # it waits for the one before, and all the others are of one device
    source = "abc"[(-turn + 2) % 3]
    assert set(said.split(", ")) == {
        f"{reader} waits for {source} (reads its output)",
        f"{source} waits for {reader} (runs after it)",
    }
