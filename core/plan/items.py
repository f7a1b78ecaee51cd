"""Items (the actions on a device's queues) and tasks (items that run together, also across devices).

A device has named queues and runs each in order. Its compute queue holds F, B, I, W, RECOMPUTE and STEP. An item of
another queue is issued between two compute items, runs concurrently with compute, and some compute items wait for it::

    compute queue      ─ 0F3 ─┬─ 0F4 ─ 0B1 ─┬─ 0B3 ─
                              │ issued      │ reader
    another queue             └─▶ [ task ] ─┘       one at a time, in order

A *task* consists of one or several items: a send and its receive, all members of a reduction, or a single item. It
starts when each of its items is issued, the tasks that the items wait for have ended, and the previous task of its
order has ended. It ends for all its items at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..actions import Action, Kind

if TYPE_CHECKING:
    from .plan import TiedWeight


class Item(NamedTuple):
    """An action on a queue.

    Args:
        issued: number of the device's compute items that have ended when it is issued.
        place: its position among all actions that the device issues.
        waits: tasks that must end before its own task starts, as positions in ``Queues.tasks``.
    """

    device: int
    queue: str
    action: Action
    issued: int
    place: int
    waits: tuple[int, ...] = ()


class Task(NamedTuple):
    """One or several items that start and end together.

    Args:
        reason: why others wait for it, for messages.
        items: its members; each device at most once, unless it holds several of a tied weight's stages.
        readers: (device, position) of the compute items that wait for its end.
        order: tasks with the same order run one after another, as listed; None for a task without one.
        weight: for REDUCE_TIED, the weight whose gradients are summed; None for other kinds.
    """

    kind: Kind
    reason: str
    items: tuple[Item, ...]
    readers: tuple[tuple[int, int], ...]
    order: tuple[str, int] | None = None
    weight: TiedWeight | None = None


class Message(NamedTuple):
    """A message from one device to another: a task of two items, stored flat because there are many.

    Args:
        issued: the sender's compute item after which it is sent.
        posted: the receiver's compute item before which its receive is posted.
        reader: the receiver's compute item that reads it.
    """

    send: Action
    receive: Action
    src: int
    dst: int
    bytes: float
    issued: int
    posted: int
    reader: int
