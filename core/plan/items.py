"""Items and tasks: what the queues of a device hold, and what items of several devices do together.

A device has named queues and works through each in order. Its compute queue holds F, B, I, W, RECOMPUTE and STEP. What
is on another queue is issued between two of these, runs next to them, and is awaited by some of them::

    compute queue      ─ 0F3 ─┬─ 0F4 ─ 0B1 ─┬─ 0B3 ─
                              │ issued      │ reader
    another queue             └─▶ [ task ] ─┘       one at a time, in order

A *task* is what one or several items do together: a send and its receive, all members of a reduction, or one item
alone. It starts when each of its items has been issued and has what it waits for, and the task before it in its order
has ended; it ends for all of them at once.
"""

from typing import NamedTuple

from ..actions import Action, Kind
from .plan import TiedWeight


class Item(NamedTuple):
    """An action on a queue.

    Args:
        device: that issues it.
        queue: name of the queue.
        action: what it does.
        issued: compute items of the device that have ended when it is issued.
        place: its position among everything that the device issues.
        waits: tasks, as positions in ``Queues.tasks``, that end before it takes part in its own.
    """

    device: int
    queue: str
    action: Action
    issued: int
    place: int
    waits: tuple[int, ...] = ()


class Task(NamedTuple):
    """What items do together.

    Args:
        kind: of its items.
        name: for people.
        reason: why others wait for it, for people.
        items: who takes part; each device at most once, unless it holds several of a tied weight's stages.
        readers: (device, position) of the compute items that wait for its end.
        order: tasks of one order run one after another, as they are listed; None for one that waits for no other.
        weight: that is summed, of a REDUCE_TIED.
    """

    kind: Kind
    name: str
    reason: str
    items: tuple[Item, ...]
    readers: tuple[tuple[int, int], ...]
    order: tuple[str, int] | None = None
    weight: TiedWeight | None = None


class Message(NamedTuple):
    """A task of two items, flat because there are many: one message from one device to another.

    Args:
        send: the action that sends it.
        receive: the action that receives it.
        src, dst: the two devices.
        bytes: its size.
        issued: the sender's compute item behind which it is sent.
        posted: the receiver's compute item in front of which its receive is posted.
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
