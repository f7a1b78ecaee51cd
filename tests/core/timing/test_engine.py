"""The times of a step without shared links, by hand and against the dependency graph; deadlocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts, compute_times
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import forward_only
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.timing.engine import report_deadlock, run_alone, run_without_times

from ...support.orders.dependency_graph import dependency_graph, topological_order
from ...support.plans import offloading_plans, orders, plan_of, plans

ONE = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
ONE_LOWERED = orders("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0STEP", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1STEP")
COST = StageCosts(1.0, 2.0, 3.0, optimizer_s=0.25)


def times(plan, lowered, hop):
    return run_alone(plan, queues_of(plan, lowered), [COST] * len(plan.stages), hop, [0.0] * 99)


def test_times_are_those_of_compute_and_of_messages_with_their_latency():
    found = times(ONE, ONE_LOWERED, lambda src, dst: (0.5, 10.0))  # 10 bytes take 1 s, and arrive 0.5 s after that
    assert found.operations == (([0.0, 10.0, 15.0], [1.0, 15.0, 15.25]), ([2.5, 3.5, 8.5], [3.5, 8.5, 8.75]))
    assert found.arrivals == {(0, 1): [2.5], (1, 0): [10.0]}


def test_a_message_occupies_its_queue_without_its_latency():
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
    found = times(plan, lower(plan, 2), lambda src, dst: (0.5, 5.0))  # the second one is ready at 2 s, and goes at 3 s
    assert found.arrivals[0, 1] == [3.5, 5.5]


def by_graph(plan, queues, hop, task_s):
    """The same by the dependency graph: per node its start and when it is ready, in topological order."""
    graph = dependency_graph(plan, queues)
    size, latency = [0.0] * len(graph.names), [0.0] * len(graph.names)
    for first, seconds in zip(graph.first_operation, compute_times(queues.compute, plan.predicted.costs), strict=True):
        size[first : first + len(seconds)] = seconds
    for pair, first in graph.first_message.items():
        latency_s, bytes_per_s = hop(*pair)
        for node, message in enumerate(queues.messages[pair], first):
            size[node], latency[node] = message.bytes / bytes_per_s, latency_s
    for node, task in enumerate(queues.tasks, len(graph.names) - len(queues.tasks)):
        size[node] = task_s(task)
    starts, drained, ready = ([0.0] * len(graph.names) for _ in range(3))
    for node in topological_order(graph):
        others = graph.before[node]
        starts[node] = max(
            (drained[at] if why == "is next in the queue" else ready[at] for at, why in others), default=0.0
        )
        drained[node] = starts[node] + size[node]
        ready[node] = starts[node] + (size[node] + latency[node])
    operations = tuple(
        (starts[first : first + len(actions)], ready[first : first + len(actions)])
        for first, actions in zip(graph.first_operation, queues.compute, strict=True)
    )
    arrivals = {pair: ready[at : at + len(queues.messages[pair])] for pair, at in graph.first_message.items()}
    return operations, arrivals


@given(st.one_of(plans(), offloading_plans()), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_times_equal_those_of_the_dependency_graph(plan, prefetch, latency_s):
    queues = queues_of(plan, lower(plan, prefetch))

    def hop(src, dst):
        return latency_s, 10.0 + src

    def task_s(task):
        return 0.7 + len(task.items)

    found = run_alone(plan, queues, plan.predicted.costs, hop, [task_s(task) for task in queues.tasks])
    operations, arrivals = by_graph(plan, queues, hop, task_s)
    assert (found.operations, found.arrivals) == (operations, arrivals)


@given(plans(), st.data())
def test_orders_that_the_graph_calls_a_deadlock_have_no_times(plan, data):
    device = data.draw(st.integers(0, plan.devices - 1))
    shuffled = data.draw(st.permutations(plan.device_actions[device]))
    changed = [*plan.device_actions[:device], tuple(shuffled), *plan.device_actions[device + 1 :]]
    other = plan_of(tuple(changed), plan.placement, edges=plan.edges, tied=plan.tied, recompute=plan.memory.recompute)
    queues = queues_of(other, lower(other))
    deadlocks = topological_order(dependency_graph(other, queues)) is None
    found = run_alone(other, queues, other.predicted.costs, lambda src, dst: (0.0, 1.0), [0.0] * 99)
    assert (found is None) == deadlocks
    if deadlocks:
        with pytest.raises(RequestError, match=r"the plan deadlocks: .* waits for .*; change the order of one of them"):
            report_deadlock(other, queues)


@given(plans(), st.integers(1, 3))
def test_limits_on_running_ahead_deadlock_where_the_graph_has_a_cycle(plan, ahead):
    plan = forward_only(plan)
    queues = queues_of(plan, lower(plan, 0))

    def limit(stage, reader):
        return ahead + reader - stage - 1

    assert (run_without_times(plan, queues, limit) is not None) == (
        topological_order(dependency_graph(plan, queues, limit)) is not None
    )


def test_cycle_of_a_deadlock_is_reported():
    plan = plan_of(orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), (0, 1))
    with pytest.raises(RequestError) as error:
        report_deadlock(plan, queues_of(plan, lower(plan)))
    assert str(error.value) == (
        "the plan deadlocks: 0B0 waits for 1B0 (reads its output), 1B0 waits for 1F1 (runs after it), "
        "1F1 waits for 0F1 (reads its output), 0F1 waits for 0B0 (runs after it); change the order of one of them"
    )
