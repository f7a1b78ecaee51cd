"""What an optimizer step waits for beside its own gradients.

Clipping by the global norm and looking for overflow need something of every stage before any of them may step:

- ``local``: nothing is needed of other stages, and a device steps once its own gradients are there.
- ``barrier``: every device joins in an all-reduce in front of its step, so all of them end with the slowest.
- ``post-validation``: a device steps by what the devices in front of it in the pipeline have passed on, and passes that
  on with its own part; the whole comes back in the next step's warm-up, where a step that should not have been taken is
  taken back. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4, "Bypassing optimizer synchronizations".)

So with a barrier the time from one training step to the next is the makespan, without one it is the stage span.
"""

import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from attrs import frozen
from simpy import Environment, Event
from simpy.events import Timeout

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.evaluate.reduction import sync_bytes, sync_time
from ..core.plan.plan import Plan
from .device import DeviceQueue
from .reduction import Reduction
from .times import ReductionTimes

_PASSED_ON_BYTES = 8
"""What a device passes on in post-validation: one number in float64, the norm of what has come by, not finite where a
gradient was not."""


class OptimizerStep(StrEnum):
    """What an optimizer step waits for."""

    LOCAL = "local"
    BARRIER = "barrier"
    POST_VALIDATION = "post-validation"


def wait_for_others(
    mode: OptimizerStep,
    environment: Environment,
    plan: Plan,
    cluster: Cluster,
    operations: Sequence[Sequence[Action]],
    devices: Sequence[DeviceQueue],
    reductions: Sequence[Reduction],
) -> Callable[[], list[ReductionTimes]]:
    """Let the first STEP of each device wait for what the mode asks for.

    Args:
        mode: what a step waits for.
        environment: SimPy's.
        plan: how much stages tell each other, and where replicas begin. What is passed on stays within a replica: after
            the reduction over replicas all of them hold the same.
        cluster: for the time of a hop, on free links.
        operations: per device its operations in order; a device without a STEP takes no part.
        devices: the queues of these operations, not yet begun.
        reductions: of tied weights and over replicas; a device's gradients are there when its own are summed.

    Returns:
        What tells, after the run, when the devices agreed; of a barrier alone.
    """
    if mode is OptimizerStep.LOCAL:
        return list
    steps = [
        _Step(number, actions[position].stage, queue, position, [each for each in reductions if queue in each.queues])
        for number, (queue, actions) in enumerate(zip(devices, operations, strict=True))
        if (position := next((at for at, action in enumerate(actions) if action.kind is Kind.STEP), None)) is not None
    ]
    if mode is OptimizerStep.BARRIER and steps:
        return _Barrier(environment, plan, cluster, steps).times
    if mode is OptimizerStep.POST_VALIDATION:
        for first in range(0, len(devices), plan.devices):
            _Chain(environment, cluster, [step for step in steps if first <= step.device < first + plan.devices])
    return list


@frozen(eq=False)
class _Step:
    """The first optimizer step of a device."""

    device: int
    stage: int
    queue: DeviceQueue
    position: int
    reductions: list[Reduction]

    @property
    def parts(self) -> int:
        """How often ``when_ready`` calls."""
        return 1 + len(self.reductions)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call for each part of the device's gradients: what it computes itself, and each sum."""
        self.queue.between[self.position].append(call)
        for reduction in self.reductions:
            reduction.on_end.append(call)

    def wait(self) -> None:
        """Wait for one thing more."""
        self.queue.pending[self.position] += 1

    def release(self) -> None:
        """That thing is there."""
        self.queue.arrived(self.position)


class _Barrier:
    """An all-reduce: to one device and back, each way as long as the slowest transfer between two of them."""

    def __init__(self, environment: Environment, plan: Plan, cluster: Cluster, steps: Sequence[_Step]) -> None:
        self.environment, self.steps, self.bytes = environment, steps, sync_bytes(plan)
        self.seconds = sync_time(plan, cluster, [step.device for step in steps])
        self.joined_s: dict[int, float] = {}
        self.start_s = self.end_s = 0.0
        self.missing = sum(step.parts for step in steps)
        for step in steps:
            step.wait()
            step.when_ready(partial(self._join, step.device))

    def _join(self, device: int) -> None:
        self.joined_s[device] = self.environment.now
        self.missing -= 1
        if not self.missing:
            self.start_s = self.environment.now
            Timeout(self.environment, self.seconds).callbacks.append(self._release)

    def _release(self, _: Event) -> None:
        self.end_s = self.environment.now
        for step in self.steps:
            step.release()

    def times(self) -> list[ReductionTimes]:
        """The SYNC of every device."""
        return [
            ReductionTimes(
                step.device, step.stage, self.joined_s[step.device], self.end_s, Kind.SYNC, self.start_s, self.bytes
            )
            for step in self.steps
        ]


class _Chain:
    """From each device to the next, behind its own gradients and what the device in front of it has passed on."""

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
        """A part of a device's own gradients, or the state of the devices in front of it, is there."""
        self.missing[place] -= 1
        if not self.missing[place] and place < len(self.seconds):
            Timeout(self.environment, self.seconds[place]).callbacks.append(partial(self._receive, place + 1))

    def _receive(self, place: int, _: Event) -> None:
        self._part(place)
        self.steps[place].release()
