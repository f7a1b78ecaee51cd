"""Instructions: the lowered actions of one device, bound to the tensors that they read and write.

All lookups happen here, before training. An instruction is two calls without arguments: one waits for the inputs of its
action, the other runs the action. Actions pass tensors to each other in a `Message`:

    RECV_F ──buffers, handle──▶ Message ──wait──▶ F ──tensors──▶ Message ──▶ SEND_F        Message ──▶ F of a stage here

The function that binds a kind is registered with ``executes``. An action of another queue than compute may store a
handle in ``Frame.pending``; the compute actions that read its task (``core/plan/items.py``) wait for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ....core.actions import WORK_KINDS, Action, Kind
from ....core.errors import RequestError
from ....core.trace.trace import COMPUTE_QUEUE
from ...offload.device_offload import BoundOffload
from ...programs.stage_run import StageRun
from ..lowered_plan import LoweredPlan
from ..step_data import Frame, Message, MessageKey, finished_sends

Call = Callable[[], None]


class Instruction(NamedTuple):
    """A bound action.

    Args:
        wait: returns when the inputs of the action are available; None if there is nothing to wait for.
        queue: name of the action's queue.
        moved: returns the bytes that the action moved, after it has run; None for an action that moves nothing.
    """

    action: Action
    wait: Call | None
    run: Call
    message: Message | None = None
    queue: str = COMPUTE_QUEUE
    moved: Callable[[], int] | None = None


class Binder:
    """Binds the actions of one device for microbatches of given shapes."""

    def __init__(
        self,
        lowered: LoweredPlan,
        device: int,
        runs: Sequence[Mapping[int, StageRun]],
        frame: Frame,
        offload: BoundOffload | None = None,
    ) -> None:
        self.plan, self.placement = lowered.plan, lowered.plan.placement
        self.device, self.runs, self.frame = device, runs, frame
        self.offload, self.host_copy_queues = offload, lowered.plan.memory.host_copy_queues
        self._messages: dict[MessageKey, Message] = {}
        self.finished = finished_sends(lowered.plan, lowered.lowered, device)
        self._fences = lowered.fences[device]
        actions = lowered.lowered[device]
        last = {action.stage: i for i, action in enumerate(actions) if action.kind in WORK_KINDS}
        self.instructions = [self._bind(action) for action in actions]
        for stage, i in last.items():
            self.instructions[i] = self._then_free_shared(self.instructions[i], stage)

    def run_of(self, action: Action) -> StageRun:
        """The stage of an action, bound for its microbatch; for the first microbatch if the action has none."""
        return self.runs[action.microbatch or 0][action.stage]

    def message(self, sender: int, reader: int, microbatch: int) -> Message:
        """The message from one stage to another, at this device."""
        return self._messages.setdefault((sender, reader, microbatch), Message())

    def _then_free_shared(self, instruction: Instruction, stage: int) -> Instruction:
        """The last compute action of a stage, after which no action reads the shared tensors."""
        runs = list({id(own[stage]): own[stage] for own in self.runs if stage in own}.values())

        def run_and_free() -> None:
            instruction.run()
            for each in runs:
                each.free_shared()

        return instruction._replace(run=run_and_free)

    def _bind(self, action: Action) -> Instruction:
        """The instruction of an action; it also waits for the actions that it is the fence of."""
        if action.kind not in INSTRUCTIONS:
            raise RequestError(
                f"the plan has {action}, and no instruction is registered for {action.kind}: remove it, or register one"
            )
        bound, awaited = INSTRUCTIONS[action.kind](self, action), self._fences.get(action)
        return bound._replace(wait=_both(partial(self.frame.wait_pending, *awaited), bound.wait)) if awaited else bound


def _both(first: Call, second: Call | None) -> Call:
    def wait() -> None:
        first()
        if second is not None:
            second()

    return wait


Bind = Callable[[Binder, Action], Instruction]
INSTRUCTIONS: dict[Kind, Bind] = {}
"""Kind → the function that binds its actions."""


def executes(*kinds: Kind) -> Callable[[Bind], Bind]:
    """Register the function that binds the actions of these kinds."""

    def register(bind: Bind) -> Bind:
        INSTRUCTIONS.update(dict.fromkeys(kinds, bind))
        return bind

    return register
