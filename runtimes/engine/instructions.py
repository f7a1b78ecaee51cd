"""Instructions: the lowered actions of one device, bound to the tensors that they read and write.

All lookups happen here, before training. An instruction is two calls without arguments: one waits for the inputs of its
action, the other runs the action. Actions pass tensors to each other in a `Message`:

    RECV_F ──buffers, handle──▶ Message ──wait──▶ F ──tensors──▶ Message ──▶ SEND_F        Message ──▶ F of a stage here

The function that binds a kind is registered with ``executes``. An action of a queue of its own may store a handle in
``Frame.pending``; its fence (``core/plan/kinds.py``) waits for it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ...core.actions import Action, Kind
from ...core.errors import RequestError
from ...core.plan.kinds import task_kinds
from ...core.plan.plan import Plan
from ...core.plan.validation.progress import AheadLimit
from ...core.trace.trace import COMPUTE_QUEUE
from ..programs.linked_stage import CapturedStage, LinkedStage
from .finished_sends import finished_sends
from .frame import Frame
from .messages import Message, MessageKey
from .tied import TiedReduction

Call = Callable[[], None]


class Instruction(NamedTuple):
    """A bound action.

    Args:
        action: the action.
        wait: returns when the inputs of the action are available; None if there is nothing to wait for.
        run: runs the action.
        message: the message of a send or receive.
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
    """Binds the actions of one device for microbatches of given shapes.

    Args:
        plan: the plan.
        lowered: the lowered actions of all devices.
        device: this device.
        runs: for each microbatch, this device's stages by index.
        tied: reduces the gradients of tied weights.
        frame: the state of the current step.
        ahead_limit: how far stages may run ahead of their readers; None for no limit.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: Sequence[Sequence[Action]],
        device: int,
        runs: Sequence[Mapping[int, LinkedStage]],
        tied: TiedReduction,
        frame: Frame,
        ahead_limit: AheadLimit | None = None,
    ) -> None:
        self.placement = plan.placement
        self.device, self.runs, self.tied, self.frame = device, runs, tied, frame
        self.ahead_limit = ahead_limit
        self._messages: dict[MessageKey, Message] = {}
        self.finished = finished_sends(plan, lowered, device)
        issued = frozenset(action for action in lowered[device] if action.kind in task_kinds())
        self.instructions = [self._bind(action, issued) for action in lowered[device]]

    def run_of(self, action: Action) -> LinkedStage:
        """The stage of an action, bound for its microbatch; for the first microbatch if the action has none."""
        return self.runs[action.microbatch or 0][action.stage]

    def captured_run_of(self, action: Action) -> CapturedStage:
        """The stage of an I, W or RECOMPUTE.

        Raises:
            RequestError: the stage has F and B only.
        """
        run = self.run_of(action)
        if not isinstance(run, CapturedStage):
            raise RequestError(
                f"the plan issues {action}, and stage {action.stage} has F and B only: plan it with B and no RECOMPUTE"
            )
        return run

    def message(self, sender: int, reader: int, microbatch: int) -> Message:
        """The message from one stage to another, at this device."""
        return self._messages.setdefault((sender, reader, microbatch), Message())

    def _bind(self, action: Action, issued: Collection[Action]) -> Instruction:
        """The instruction of an action; it also waits for the actions that it is the fence of."""
        if action.kind not in INSTRUCTIONS:
            raise RequestError(f"the plan issues {action}, and no runtime knows how to do a {action.kind}: remove it")
        bound = INSTRUCTIONS[action.kind](self, action)
        fenced = (
            Action(action.stage, kind, action.microbatch)
            for kind, declared in task_kinds().items()
            if action.kind in declared.fence
        )
        awaited = tuple(each for each in fenced if each in issued)
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
