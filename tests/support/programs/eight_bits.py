"""A policy of a test, all of it in this file: messages between stages in 8 bits.

They have a quarter of the bytes. PACK compresses each on a queue of its own after F, into memory that B or I frees.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from attrs import evolve
from panpipe.core.actions import Action, Kind, declare_kind
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.costs import Compute, StageCosts
from panpipe.core.costs.graph import OpGraph
from panpipe.core.plan.items import Item, Task
from panpipe.core.plan.kinds import Movement, TaskKind, declare, task_kinds
from panpipe.core.plan.memory import Change, Moment, Size, Use
from panpipe.core.plan.plan import Plan

PACK, QUEUE, SECONDS = declare_kind("PACK"), "packing", 0.25


def packed(graph: OpGraph) -> OpGraph:
    """The graph with messages of 8 bits for those of 32."""
    return evolve(graph, edges=tuple(evolve(edge, bytes=-(-edge.bytes // 4)) for edge in graph.edges))


def insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    """A PACK after each F of a stage that sends to another device."""
    where = plan.placement
    sending = {edge.src for edge in plan.edges if where[edge.src] != where[edge.dst]}
    for position, action in enumerate(plan.device_actions[device] if sending else ()):
        if action.kind is Kind.F and action.stage in sending:
            yield position, Action(action.stage, PACK, action.microbatch)


def tasks(_: Plan, compute: Compute, items: Sequence[Item], __: Sequence[Task]) -> Iterator[Task]:
    """One task an item; B or I of the same stage and microbatch waits for it."""
    places = [{action: at for at, action in enumerate(actions)} for actions in compute] if items else []
    for item in items:
        device, action = item.device, item.action
        readers = (places[device].get(Action(action.stage, kind, action.microbatch)) for kind in (Kind.B, Kind.I))
        reader = min((position for position in readers if position is not None), default=None)
        yield Task(PACK, f"needs {QUEUE}", (item,), () if reader is None else ((device, reader),), (QUEUE, device))


def moves(task: Task, _: Plan, costs: Sequence[StageCosts], __: Cluster) -> Movement:
    """The time of one."""
    return Movement(seconds=SECONDS)


HELD = (Change(Moment.START, Use.SAVED, Size.WORKSPACE, 1), Change(Moment.END, Use.SAVED, Size.WORKSPACE, -1))
KIND = TaskKind((PACK,), QUEUE, insert, tasks, moves, changes={PACK: HELD})


@contextmanager
def declared(declaration: TaskKind) -> Iterator[None]:
    """Declare kinds within a context; the earlier declarations are restored when it exits."""
    with patch.dict(task_kinds()):
        declare(declaration)
        yield
