"""What an optimizer step waits for in addition to its own gradients.

Clipping by the global norm and the overflow check need a value of every stage before any stage may step:

- ``local``: a device steps once its own gradients are complete, as in a plan without ``sync``.
- ``barrier``: every device joins an all-reduce before its step, as in a plan with ``sync``.
- ``post-validation``: a device steps with the partial result of the earlier devices in the pipeline, and sends it on
  with its own part; the full result returns in the next step's warm-up, where an invalid step is rolled back. (Zero
  Bubble Pipeline Parallelism, arXiv 2401.10241, section 4, "Bypassing optimizer synchronizations".)

So with a barrier the time from one training step to the next is the makespan, without one it is the stage span.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from itertools import pairwise

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.lowering.queues import Queues
from ..core.plan.items import Item, Task
from ..core.plan.kinds import Movement
from ..core.plan.plan import Plan
from ..core.trace.trace import COMPUTE_QUEUE
from .device import DeviceQueue
from .network import Network
from .tasks import RunningTask

_PASSED_ON_BYTES = 8
"""Message size of post-validation: one float64, the norm so far, not finite if a gradient was not."""


class OptimizerStep(StrEnum):
    """What an optimizer step waits for."""

    LOCAL = "local"
    BARRIER = "barrier"
    POST_VALIDATION = "post-validation"


def with_sync(lowered: Sequence[Sequence[Action]], sync: bool) -> list[list[Action]]:
    """The lowered lists with a SYNC before the first STEP of each device, or without any."""
    result = [[action for action in actions if action.kind is not Kind.SYNC] for actions in lowered]
    for actions, at in zip(result, _first_steps(result), strict=True):
        if sync and at is not None:
            actions.insert(at, Action(actions[at].stage, Kind.SYNC))
    return result


def _first_steps(lists: Sequence[Sequence[Action]]) -> list[int | None]:
    return [next((at for at, action in enumerate(actions) if action.kind is Kind.STEP), None) for actions in lists]


def validate_afterwards(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    queues: Queues,
    devices: Sequence[DeviceQueue],
    tasks: Sequence[RunningTask],
) -> None:
    """Make the first STEP of each device wait for a message of the previous device with a STEP (post-validation).

    Args:
        plan: gives the devices per replica. The messages stay within a replica: after the reduction over replicas all
            of them hold the same gradients.
        cluster: for the time of a hop, on free links.
        queues: of all replicas.
        devices: their compute queues, not yet started.
        tasks: the gradients of a device are complete when all of them that its STEPs wait for have ended.
    """
    steps = [(device, at) for device, at in enumerate(_first_steps(queues.compute)) if at is not None]
    known = list(tasks)
    for (src, at), (dst, reader) in pairwise(steps):
        if src // plan.devices != dst // plan.devices:
            continue
        # Of these is also the message to this device.
        waits = [
            number for number, other in enumerate(known)
            if any(device == src and position >= at for device, position in other.task.readers)
        ]  # fmt: skip
        item = Item(src, COMPUTE_QUEUE, queues.compute[src][at], at, at, tuple(waits))
        task = Task(Kind.SYNC, "passes its norm on", (item,), ((dst, reader),))
        seconds = cluster.transfer_s(src, dst, _PASSED_ON_BYTES)
        message = RunningTask(network, task, Movement(seconds=seconds), devices, None, None)
        join = partial(message.join, 0)
        devices[src].between[at].append(join)
        for number in waits:
            known[number].on_end.append(join)
        known.append(message)
