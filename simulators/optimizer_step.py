"""What an optimizer step waits for in addition to its own gradients.

Clipping by the global norm and the overflow check need a value of every stage before any stage may step:

- ``local``: a device steps once its own gradients are complete, independent of other stages.
- ``barrier``: every device joins an all-reduce before its step, so all wait for the slowest.
- ``post-validation``: a device steps with the partial result of the earlier devices in the pipeline, and sends it on
  with its own part; the full result returns in the next step's warm-up, where an invalid step is rolled back. (Zero
  Bubble Pipeline Parallelism, arXiv 2401.10241, section 4, "Bypassing optimizer synchronizations".)

So with a barrier the time from one training step to the next is the makespan, without one it is the stage span.
"""

import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from attrs import evolve, frozen
from simpy import Environment, Event
from simpy.events import Timeout

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.lowering.queues import Queues
from ..core.plan.items import Item
from ..core.plan.plan import Plan
from ..core.policies.end_of_step import sync_task
from ..core.trace.trace import COMPUTE_QUEUE
from .device import DeviceQueue
from .tasks import RunningTask

_PASSED_ON_BYTES = 8
"""Message size of post-validation: one float64, the norm so far, not finite if a gradient was not."""


class OptimizerStep(StrEnum):
    """What an optimizer step waits for."""

    LOCAL = "local"
    BARRIER = "barrier"
    POST_VALIDATION = "post-validation"


def with_sync(queues: Queues, mode: OptimizerStep, plan: Plan) -> Queues:
    """The queues with a SYNC if and only if the mode is a barrier; if the plan has none, it is added before the first
    STEP of each device."""
    if mode is not OptimizerStep.BARRIER:
        return queues.without(Kind.SYNC)
    if plan.sync:
        return queues
    items = [
        Item(device, COMPUTE_QUEUE, Action(stage, Kind.SYNC), at, at) for device, stage, at in _first_steps(queues)
    ]
    return evolve(queues, tasks=(*queues.tasks, *sync_task(plan, queues.compute, items, queues.tasks)))


def _first_steps(queues: Queues) -> list[tuple[int, int, int]]:
    """Device, stage and position of the first STEP of each device that has one."""
    found = []
    for device, actions in enumerate(queues.compute):
        at = next((at for at, action in enumerate(actions) if action.kind is Kind.STEP), None)
        if at is not None:
            found.append((device, actions[at].stage, at))
    return found


def validate_afterwards(
    environment: Environment,
    plan: Plan,
    cluster: Cluster,
    queues: Queues,
    devices: Sequence[DeviceQueue],
    tasks: Sequence[RunningTask],
) -> None:
    """Make the first STEP of each device wait for the previous devices (post-validation).

    Args:
        environment: SimPy's.
        plan: gives the devices per replica. The partial results stay within a replica: after the reduction over
            replicas all of them hold the same gradients.
        cluster: for the time of a hop, on free links.
        queues: of all replicas; a device without a STEP does not take part.
        devices: their compute queues, not yet started.
        tasks: the gradient reductions; a device's gradients are complete when its own are summed.
    """
    steps = [
        _Step(device, devices[device], at, [t for t in tasks if any(item.device == device for item in t.task.items)])
        for device, _, at in _first_steps(queues)
    ]
    for first in range(0, len(devices), plan.devices):
        _Chain(environment, cluster, [step for step in steps if first <= step.device < first + plan.devices])


@frozen(eq=False)
class _Step:
    """The first optimizer step of a device."""

    device: int
    queue: DeviceQueue
    position: int
    tasks: list[RunningTask]

    @property
    def parts(self) -> int:
        """Number of calls by ``when_ready``."""
        return 1 + len(self.tasks)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call for each part of the device's gradients: its own compute, and each reduction."""
        self.queue.between[self.position].append(call)
        for running in self.tasks:
            running.on_end.append(call)

    def wait(self) -> None:
        """Wait for one more condition."""
        self.queue.pending[self.position] += 1

    def release(self) -> None:
        """The condition is met."""
        self.queue.arrived(self.position)


class _Chain:
    """Messages from each device to the next, after its own gradients and the previous device's message."""

    def __init__(self, environment: Environment, cluster: Cluster, steps: Sequence[_Step]) -> None:
        self.environment, self.steps = environment, steps
        numbers = [step.device for step in steps]
        self.seconds = [cluster.transfer_s(a, b, _PASSED_ON_BYTES) for a, b in itertools.pairwise(numbers)]
        self.missing = [step.parts + bool(place) for place, step in enumerate(steps)]
        for place, step in enumerate(steps):
            step.when_ready(partial(self._part, place))
            if place:
                step.wait()

    def _part(self, place: int) -> None:
        """A part of a device's own gradients, or the previous device's message, is there."""
        self.missing[place] -= 1
        if not self.missing[place] and place < len(self.seconds):
            Timeout(self.environment, self.seconds[place]).callbacks.append(partial(self._receive, place + 1))

    def _receive(self, place: int, _: Event) -> None:
        self._part(place)
        self.steps[place].release()
