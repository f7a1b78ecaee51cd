"""Instructions: the lowered actions of one device, bound to what they read and write.

Everything that can be looked up before training is looked up here: an instruction is two calls without arguments, one
that waits for what its action reads and one that does it. Actions meet in `Mail`:

    RECV_F ──buffers, handle──▶ Mail ──wait──▶ F ──tensors──▶ Mail ──▶ SEND_F        Mail ──▶ F of a stage here

What is bound for a kind is registered with ``executes``. An action of a queue of its own may leave a handle in
``Frame.pending``, for which its fence (``core/plan/kinds.py``) waits.
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
from ..programs.linked_stage import LinkedStage
from .finished_sends import finished_sends
from .frame import Frame
from .mail import Mail, Message
from .tied import TiedReduction

Call = Callable[[], None]


class Instruction(NamedTuple):
    """A bound action.

    Args:
        action: the action.
        wait: returns when what the action reads is there; None where nothing is to be waited for.
        run: does it.
        mail: what a communication moves.
        queue: name of the action's queue.
        moved: the bytes that it moves, known once it has run; None for an action that moves nothing.
    """

    action: Action
    wait: Call | None
    run: Call
    mail: Mail | None = None
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
        frame: filled in anew for every step.
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
        self._mail: dict[Message, Mail] = {}
        self.finished = finished_sends(plan, lowered, device)
        issued = frozenset(action for action in lowered[device] if action.kind in task_kinds())
        self.instructions = [self._bind(action, issued) for action in lowered[device]]

    def run_of(self, action: Action) -> LinkedStage:
        """The stage that an action works on, bound for its microbatch; for the first one where it has none."""
        return self.runs[action.microbatch or 0][action.stage]

    def message(self, sender: int, reader: int, microbatch: int) -> Mail:
        """A message from one stage to another, at this device."""
        return self._mail.setdefault((sender, reader, microbatch), Mail())

    def _bind(self, action: Action, issued: Collection[Action]) -> Instruction:
        """The instruction of an action, which waits for those that it is the fence of."""
        if action.kind not in INSTRUCTIONS:
            raise RequestError(f"the plan issues {action}, and no runtime knows how to do a {action.kind}: remove it")
        bound = INSTRUCTIONS[action.kind](self, action)
        fenced = (
            Action(action.stage, kind, action.microbatch)
            for kind, declared in task_kinds().items()
            if action.kind in declared.fence
        )
        awaited = tuple(each for each in fenced if each in issued)
        return bound._replace(wait=_both(partial(self.frame.settle, *awaited), bound.wait)) if awaited else bound


def _both(first: Call, second: Call | None) -> Call:
    def wait() -> None:
        first()
        if second is not None:
            second()

    return wait


Bind = Callable[[Binder, Action], Instruction]
INSTRUCTIONS: dict[Kind, Bind] = {}
"""What binds the actions of each kind."""


def executes(*kinds: Kind) -> Callable[[Bind], Bind]:
    """Register what binds the actions of some kinds."""

    def register(bind: Bind) -> Bind:
        INSTRUCTIONS.update(dict.fromkeys(kinds, bind))
        return bind

    return register
