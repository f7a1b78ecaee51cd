"""The dependency graph of a lowered plan, as the oracle of `engine`.

Nodes are compute items, messages and tasks; each lists what it waits for, by the rules of `engine`.
"""

from collections.abc import Mapping

from attrs import field, frozen
from panpipe.core.actions import Kind
from panpipe.core.lowering.queues import Queues
from panpipe.core.plan.plan import Plan
from panpipe.core.timing.engine import AheadLimit

Node = int
"""Index of a compute item, message or task in `DependencyGraph`."""

_PRODUCERS = (Kind.F, Kind.B, Kind.I)
"""Kinds of compute items whose outputs other items read."""

_ORDER, _READS, _SENDS, _POSTS, _QUEUE, _AHEAD = (
    "runs after it",
    "reads its output",
    "sends its output",
    "its receive is posted after it",
    "is next in the queue",
    "may not run further ahead of it",
)


@frozen
class DependencyGraph:
    """The dependency graph.

    Args:
        names: of every node, for messages.
        before: per node the nodes that it waits for, each with the reason.
        first_operation: node of every device's first operation; the following ones are consecutive.
        first_message: node of every queue's first message; the following ones are consecutive.
    """

    names: list[str] = field(factory=list)
    before: list[list[tuple[Node, str]]] = field(factory=list)
    first_operation: list[Node] = field(factory=list)
    first_message: dict[tuple[int, int], Node] = field(factory=dict)

    def add(self, name: str, before: list[tuple[Node, str]]) -> Node:
        """Add a node."""
        self.names.append(name)
        self.before.append(before)
        return len(self.names) - 1


def dependency_graph(plan: Plan, queues: Queues, limit: AheadLimit | None = None) -> DependencyGraph:
    """The dependency graph of a lowered plan.

    Args:
        plan: the plan.
        queues: of the lowered plan.
        limit: how many microbatches a stage may run ahead of the transfers to a reader; None for no limit.
    """
    graph = DependencyGraph()
    produced: dict[tuple[int, bool, int | None], Node] = {}
    for actions in queues.compute:
        graph.first_operation.append(len(graph.names))
        for position, action in enumerate(actions):
            node = graph.add(str(action), [(len(graph.names) - 1, _ORDER)] if position else [])
            if action.kind in _PRODUCERS:
                produced[action.stage, action.kind is Kind.F, action.microbatch] = node
    _add_local_reads(plan, graph, produced)
    for (src, dst), messages in queues.messages.items():
        graph.first_message[src, dst] = len(graph.names)
        for position, message in enumerate(messages):
            before = [(graph.first_operation[src] + message.issued, _SENDS)]
            if message.posted:
                before.append((graph.first_operation[dst] + message.posted - 1, _POSTS))
            if position:
                before.append((len(graph.names) - 1, _QUEUE))
            node = graph.add(str(message.send), before)
            graph.before[graph.first_operation[dst] + message.reader].append((node, _READS))
    if limit is not None:
        _add_ahead_limits(queues, graph, limit, produced)
    _add_tasks(queues, graph)
    return graph


def _add_ahead_limits(
    queues: Queues, graph: DependencyGraph, limit: AheadLimit, produced: Mapping[tuple[int, bool, int | None], Node]
) -> None:
    """A forward waits until its stage is no longer too far ahead of its readers."""
    for pair, first in graph.first_message.items():
        for position, message in enumerate(queues.messages[pair]):
            stage, reader, microbatch = message.send.stage, message.send.peer, message.send.microbatch
            if message.send.kind is Kind.SEND_F and reader is not None and microbatch is not None:
                later = produced.get((stage, True, microbatch + limit(stage, reader)))
                if later is not None:
                    graph.before[later].append((first + position, _AHEAD))


def _add_local_reads(plan: Plan, graph: DependencyGraph, produced: dict[tuple[int, bool, int | None], Node]) -> None:
    """Stages of one device read each other's tensors without a message."""
    for edge in plan.edges:
        if plan.placement[edge.src] != plan.placement[edge.dst]:
            continue
        for microbatch in range(plan.microbatches):
            graph.before[produced[edge.dst, True, microbatch]].append((produced[edge.src, True, microbatch], _READS))
            if edge.gradient_bytes > 0:
                graph.before[produced[edge.src, False, microbatch]].append(
                    (produced[edge.dst, False, microbatch], _READS)
                )


def _add_tasks(queues: Queues, graph: DependencyGraph) -> None:
    first = len(graph.names)
    ahead: dict[tuple[str, int], Node] = {}
    for task in queues.tasks:
        before = [
            (graph.first_operation[item.device] + item.issued - 1, task.reason) for item in task.items if item.issued
        ]
        before += [(first + other, queues.tasks[other].reason) for item in task.items for other in item.waits]
        if task.order in ahead:
            before.append((ahead[task.order], _QUEUE))
        node = graph.add(task.name, before)
        if task.order is not None:
            ahead[task.order] = node
        for device, position in task.readers:
            graph.before[graph.first_operation[device] + position].append((node, task.reason))


def topological_order(graph: DependencyGraph) -> list[Node] | None:
    """All nodes in topological order; None if the plan deadlocks."""
    missing = [len(before) for before in graph.before]
    after: list[list[Node]] = [[] for _ in graph.names]
    for node, before in enumerate(graph.before):
        for other, _ in before:
            after[other].append(node)
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:
        for other in after[node]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    return order if len(order) == len(graph.names) else None
