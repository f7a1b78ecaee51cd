"""Declarations of action kinds, for lowering, validation, simulation and traces.

A kind of the compute queue has a time (``COMPUTE_SECONDS``). Every other kind, except sends and receives, is declared
in a ``TaskKind``: where lowering inserts its actions, and which tasks they form. No other code names it: validation,
memory, the simulator, traces and the executor read queues, items and tasks. The declarations are in ``core/policies``.
The executor's function for a kind is registered in ``runtimes/engine/instructions/instructions.py``. Two kinds that are
not of the package are in ``tests``: `test_own_kind` and `test_toy_policy`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import field, frozen

from ..actions import Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.collectives import Phase
from ..costs.costs import Compute, StageCosts
from .items import Item, Task
from .memory import Change
from .plan import Plan

AFTER_STEP = -2
"""The position of an action that follows the STEP of its stage."""


@frozen
class Movement:
    """What a task moves, and how long it takes.

    Args:
        steps: its transfers: those of a step run at the same time, and the steps one after another.
        bytes: of the part of one member.
        seconds: its duration if it has no transfers.
    """

    steps: Sequence[Sequence[Phase]] = ()
    bytes: float = 0.0
    seconds: float = 0.0

    @property
    def alone_s(self) -> float:
        """Its duration on links that nothing else uses."""
        return sum(max(phase.seconds for phase in step) for step in self.steps) if self.steps else self.seconds


Moves = Callable[[Task, Plan, Sequence[StageCosts], Cluster], Movement]


@frozen(eq=False)
class TaskKind:
    """Kinds whose actions are on another queue than compute, or end on the compute queue together with others.

    Args:
        kinds: one, or several that share queues.
        queue: name of their queue on every device; ``tasks`` may give an item another.
        insert: (plan, device) → their actions, each with the position in the compute order that it follows; None for
            after all compute, before the STEPs; ``AT_START`` for before all compute; ``AFTER_STEP`` for after the
            STEP of its stage.
        tasks: (plan, compute, items device by device in the order issued, tasks declared before) → their tasks. Items
            are where ``insert`` placed them.
        moves: (task, plan, costs of whole stages, cluster with its devices in the order of ranks) → what a task moves;
            None if it moves nothing and takes no time.
        changes: memory changes by kind, at fixed positions of the compute order, so that the memory of an order does
            not depend on the duration of tasks: the start is when an action is issued, the end is when its reader on
            the same device starts.
        joins_replicas: whether the same items of all replicas take part in one task.
    """

    kinds: tuple[Kind, ...]
    queue: str
    insert: Callable[[Plan, int], Iterable[tuple[int | None, Action]]]
    tasks: Callable[[Plan, Compute, Sequence[Item], Sequence[Task]], Iterable[Task]]
    moves: Moves | None = None
    changes: Mapping[Kind, Sequence[Change]] = field(factory=dict)
    joins_replicas: bool = False


_DECLARED: dict[Kind, TaskKind] = {}


def task_kinds() -> Mapping[Kind, TaskKind]:
    """The declaration of every kind, in order of declaration."""
    return _DECLARED


def declarations() -> Iterable[TaskKind]:
    """All declarations, in order, each once."""
    return dict.fromkeys(_DECLARED.values())


def movement(task: Task, plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> Movement:
    """What a task moves; arguments as of ``TaskKind.moves``."""
    moves = _DECLARED[task.kind].moves
    return Movement() if moves is None else moves(task, plan, costs, cluster)


def seconds_alone(tasks: Iterable[Task], plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> list[float]:
    """Duration of every task on links that nothing else uses; further arguments as of ``TaskKind.moves``."""
    known: dict[tuple[object, ...], float] = {}  # those of other microbatches take as long
    found = []
    for task in tasks:
        key = task.kind, task.items[0].action.stage, task.items[0].device, task.weight
        if key not in known:
            known[key] = movement(task, plan, costs, cluster).alone_s
        found.append(known[key])
    return found


def declare(declaration: TaskKind) -> TaskKind:
    """Register a declaration. It replaces earlier declarations of the same kinds."""
    _DECLARED.update(dict.fromkeys(declaration.kinds, declaration))
    return declaration
