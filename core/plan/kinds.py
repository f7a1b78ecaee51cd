"""What is known of a kind of action wherever plans are lowered, validated, simulated and traced.

A kind of the compute queue has a time (``COMPUTE_SECONDS``). Every other kind, but for sends and receives, is declared
as a ``TaskKind``: where lowering puts its actions, and which tasks they form. Nothing else names it: validation,
memory, the simulator, traces and the executor read queues, items and tasks. Those of a step's end are in
``step_end.py``; ``own_queue`` declares a kind that each stage does for each microbatch next to compute. What the
executor calls for a kind is registered with ``runtimes/engine/instructions.py``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import frozen

from ..actions import Action, Kind
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..evaluate.memory import Change
from .items import Item, Task
from .plan import Plan

Seconds = Callable[[StageCosts], float]
"""How long an action takes, by the costs of its stage."""

COMPUTE_SECONDS: Mapping[Kind, Seconds] = {
    Kind.F: lambda cost: cost.forward_s,
    Kind.B: lambda cost: cost.full_backward_s,
    Kind.I: lambda cost: cost.backward_input_s,
    Kind.W: lambda cost: cost.backward_weight_s,
    Kind.RECOMPUTE: lambda cost: cost.second_forward_s,
    Kind.STEP: lambda cost: cost.optimizer_s,
}
"""The kinds of the compute queue."""

Compute = Sequence[Sequence[Action]]
"""Per device the actions of its compute queue, in order."""


def compute_times(compute: Compute, costs: Iterable[StageCosts]) -> list[list[float]]:
    """Seconds of every item of the compute queues."""
    by_stage = [{kind: seconds(cost) for kind, seconds in COMPUTE_SECONDS.items()} for cost in costs]
    return [[by_stage[action.stage][action.kind] for action in actions] for actions in compute]


@frozen(eq=False)
class TaskKind:
    """A kind whose actions are not on the compute queue, or end there when others do.

    Args:
        kind: its letters in the grammar.
        queue: name of its queue; every device has one of this name.
        insert: (plan, device) → its actions, each with the position in the compute order that it comes after; None for
            one that comes after all compute, and before the STEPs.
        tasks: (plan, compute, items, tasks of the kinds declared before) → its tasks. Raises RequestError where an item
            is missing, or is where it must not be.
        seconds: how long a task takes by itself; None where that depends on links and members, which the simulator
            knows.
        changes: of memory, at fixed places of the compute order, so that what an order holds does not depend on how
            long a task takes: its start counts from when it is issued, its end from when its reader on the same device
            starts.
        fence: kinds of the compute queue whose action of the same stage and microbatch waits for its end.
        joins_replicas: whether the same items of all replicas take part in one task.
    """

    kind: Kind
    queue: str
    insert: Callable[[Plan, int], Iterable[tuple[int | None, Action]]]
    tasks: Callable[[Plan, Compute, Sequence[Item], Sequence[Task]], Iterable[Task]]
    seconds: Seconds | None = None
    changes: tuple[Change, ...] = ()
    fence: Collection[Kind] = ()
    joins_replicas: bool = False


_DECLARED: dict[Kind, TaskKind] = {}


def task_kinds() -> Mapping[Kind, TaskKind]:
    """All that are declared, in that order."""
    return _DECLARED


def task_seconds(task: Task, costs: Sequence[StageCosts]) -> float | None:
    """How long a task takes by itself; None where that depends on links and members."""
    seconds = _DECLARED[task.kind].seconds
    return None if seconds is None else seconds(costs[task.items[0].action.stage])


def declare(found: TaskKind) -> TaskKind:
    """Add a kind, or replace one of the same letters."""
    _DECLARED[found.kind] = found
    return found


@contextmanager
def declared(found: TaskKind) -> Iterator[TaskKind]:
    """Add a kind for as long as the context is open."""
    before = _DECLARED.get(found.kind)
    declare(found)
    try:
        yield found
    finally:
        if before is None:
            del _DECLARED[found.kind]
        else:
            _DECLARED[found.kind] = before


def own_queue(
    kind: Kind,
    queue: str,
    *,
    stages: Callable[[Plan], Collection[int]],
    after: Kind,
    fence: Collection[Kind],
    seconds: Seconds,
    changes: Sequence[Change] = (),
) -> TaskKind:
    """A kind that stages do for each microbatch on a queue of its own, one after another.

    Args:
        kind: its letters.
        queue: name of the queue.
        stages: of a plan that do it.
        after: kind of the compute item of the same stage and microbatch that it follows.
        fence: kinds of compute items of the same stage and microbatch; the first of them waits for it. Empty where none
            does.
        seconds: how long it takes.
        changes: of memory.
    """

    def insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
        doing = stages(plan)
        for position, action in enumerate(plan.device_actions[device] if doing else ()):
            if action.kind is after and action.stage in doing:
                yield position, Action(action.stage, kind, action.microbatch)

    def tasks(plan: Plan, compute: Compute, items: Sequence[Item], _: Sequence[Task]) -> Iterator[Task]:
        wanted = {(device, action) for device in range(plan.devices) for _, action in insert(plan, device)}
        places = [{action: at for at, action in enumerate(actions)} for actions in compute] if items else []
        for item in items:
            device, action = item.device, item.action
            if (device, action) not in wanted:
                raise RequestError(f"device {device} issues {action}, which the plan does not ask for: remove it")
            wanted.remove((device, action))
            at = {each: places[device].get(Action(action.stage, each, action.microbatch)) for each in (after, *fence)}
            readers = [at[each] for each in fence]
            reader = min((position for position in readers if position is not None), default=None)
            _check_between(item, compute[device], at[after], reader)
            fenced = () if reader is None else ((device, reader),)
            yield Task(kind, str(action), f"needs {queue}", (item,), fenced, (queue, device))
        if wanted:
            device, action = min(wanted, key=lambda missing: (missing[0], str(missing[1])))
            raise RequestError(f"device {device} issues no {action}, and the plan asks for it: add it")

    return TaskKind(kind, queue, insert, tasks, seconds, tuple(changes), fence)


def _check_between(item: Item, compute: Sequence[Action], after: int | None, reader: int | None) -> None:
    """An item is issued after what it reads, and before what waits for it."""
    if after is None or after >= item.issued:
        raise RequestError(f"{item.action} is issued before the action that it follows: move it after that")
    if reader is not None and reader < item.issued:
        raise RequestError(f"{item.action} is issued after {compute[reader]}, which waits for it: move it before that")
