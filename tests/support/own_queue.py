"""Declares a kind that runs once per stage and microbatch on a queue of its own, as a policy of another package may."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from panpipe.core.actions import Action, Kind
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.costs import Compute, Seconds, StageCosts
from panpipe.core.plan.items import Item, Task
from panpipe.core.plan.kinds import Movement, TaskKind, declare, task_kinds
from panpipe.core.plan.memory import Change
from panpipe.core.plan.plan import Plan


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
    """A kind that runs once per stage and microbatch on a queue of its own, one action after another.

    Args:
        stages: plan → the stages that run it.
        after: kind of the compute item of the same stage and microbatch that it follows.
        fence: kinds of compute items of the same stage and microbatch; the first of them waits for it. Empty if none
            waits.
    """

    def insert(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
        doing = stages(plan)
        for position, action in enumerate(plan.device_actions[device] if doing else ()):
            if action.kind is after and action.stage in doing:
                yield position, Action(action.stage, kind, action.microbatch)

    def tasks(_: Plan, compute: Compute, items: Sequence[Item], __: Sequence[Task]) -> Iterator[Task]:
        places = [{action: at for at, action in enumerate(actions)} for actions in compute] if items else []
        for item in items:
            device, action = item.device, item.action
            found = (places[device].get(Action(action.stage, each, action.microbatch)) for each in fence)
            reader = min((position for position in found if position is not None), default=None)
            fenced = () if reader is None else ((device, reader),)
            yield Task(kind, f"needs {queue}", (item,), fenced, (queue, device))

    def moves(task: Task, _: Plan, costs: Sequence[StageCosts], __: Cluster) -> Movement:
        return Movement(seconds=seconds(costs[task.items[0].action.stage]))

    return TaskKind((kind,), queue, insert, tasks, moves, changes={kind: changes})


@contextmanager
def declared(declaration: TaskKind) -> Iterator[None]:
    """Declare kinds within a context; the earlier declarations are restored when it exits."""
    with patch.dict(task_kinds()):
        declare(declaration)
        yield
