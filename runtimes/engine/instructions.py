"""Instructions: the lowered actions of one device, bound to what they read and write.

Everything that can be looked up before training is looked up here: an instruction is two calls without arguments, one
that waits for what its action reads and one that does it. Actions meet in `Mail`:

    RECV_F ──buffers, handle──▶ Mail ──wait──▶ F ──tensors──▶ Mail ──▶ SEND_F        Mail ──▶ F of a stage here
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.actions import SEND_KINDS, Action, Kind
from ...core.capture.graph.storages import StorageMeter
from ...core.plan.plan import Plan
from ...core.plan.validation.progress import Room
from ..programs.stage_run import StageRun
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
    """

    action: Action
    wait: Call | None
    run: Call
    mail: Mail | None


class Binder:
    """Binds the actions of one device for microbatches of given shapes.

    Args:
        plan: the plan.
        lowered: the lowered actions of all devices.
        device: this device.
        runs: for each microbatch, this device's stages by index.
        tied: reduces the gradients of tied weights.
        frame: filled in anew for every step.
        room: how far stages may run ahead of their readers; None where nothing holds them up.
    """

    def __init__(
        self, plan: Plan, lowered: Sequence[Sequence[Action]], device: int,
        runs: Sequence[Mapping[int, StageRun]], tied: TiedReduction, frame: Frame,
        room: Room | None = None,
    ) -> None:  # fmt: skip
        self._placement = plan.placement
        self._device, self._runs, self._tied, self._frame = device, runs, tied, frame
        self._room = room
        self._mail: dict[Message, Mail] = {}
        self._finished = finished_sends(plan, lowered, device)
        self.instructions = [self._bind(action) for action in lowered[device]]

    def _bind(self, action: Action) -> Instruction:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if microbatch is None:
            return self._bind_end_of_step(action)
        if action.peer is not None:
            key = (stage, action.peer, microbatch) if kind in SEND_KINDS else (action.peer, stage, microbatch)
            mail = self._message(*key)
            bind = self._send if kind in SEND_KINDS else self._receive
            return Instruction(action, None, bind(action, microbatch, mail), mail)
        run = self._runs[microbatch][stage]
        match kind:
            case Kind.F:
                wait = self._arrivals(Kind.RECV_F, stage, microbatch, run.senders)
                wait = self._with_room(run, microbatch, wait)
                return Instruction(action, wait, self._forward(run, microbatch), None)
            case Kind.B | Kind.I:
                wait = self._arrivals(Kind.RECV_B, stage, microbatch, run.receivers)
                return Instruction(action, wait, self._backward(run, microbatch, kind is Kind.I), None)
            case Kind.RECOMPUTE:
                return Instruction(action, None, self._recompute(run, microbatch), None)
            case _:
                return Instruction(action, None, self._backward_weight(run, microbatch), None)

    def _message(self, sender: int, reader: int, microbatch: int) -> Mail:
        return self._mail.setdefault((sender, reader, microbatch), Mail())

    # Compute

    def _arrivals(self, kind: Kind, stage: int, microbatch: int, senders: Sequence[int]) -> Call | None:
        """Waits for the messages from other devices, and settles the sends that are over when these have arrived."""
        frame, mark = self._frame, self._frame.queue.mark
        expected = []
        for sender in senders:
            if self._placement[sender] != self._device:
                receive = Action(stage, kind, microbatch, sender)
                finished = [self._message(*key) for key in self._finished.get(receive, ())]
                expected.append((receive, self._message(sender, stage, microbatch), finished))

        def wait() -> None:
            for receive, mail, finished in expected:
                handle, mail.handle = mail.handle, None
                assert handle is not None
                handle.wait()
                if frame.traced:
                    frame.arrivals[receive] = mark()
                for sent in finished:
                    sent.settle()

        return wait if expected else None

    def _with_room(self, run: StageRun, microbatch: int, wait: Call | None) -> Call | None:
        """Waits, in front of what an F waits for, until its readers are not too far behind."""
        if self._room is None:
            return wait
        ahead = {dst: microbatch - self._room(run.index, dst) for dst in run.outgoing}
        left = [
            self._message(run.index, dst, before)
            for dst, before in ahead.items()
            if before >= 0 and self._placement[dst] != self._device
        ]

        def wait_for_room() -> None:
            for mail in left:
                mail.settle()
            if wait is not None:
                wait()

        return wait_for_room if left else wait

    def _forward(self, run: StageRun, microbatch: int) -> Call:
        frame, forward = self._frame, run.forward
        incoming = [self._message(src, run.index, microbatch) for src in run.senders]
        sources = [(self._message(src, run.index, microbatch), place) for src, place in run.sources]
        outgoing = [(self._message(run.index, dst, microbatch), places) for dst, places in run.outgoing.items()]
        names = run.programs.results

        def call() -> None:
            boundary = [mail.tensors[place] for mail, place in sources if mail.tensors is not None]
            for mail in incoming:
                mail.tensors = None
            leaves = frame.given(microbatch)
            outputs, results = forward(microbatch, boundary, leaves, frame.keys[microbatch])
            for mail, places in outgoing:
                mail.tensors = [outputs[place] for place in places]
            if frame.meter is not None:
                _watch(frame.meter, run, microbatch, leaves)
            if names:
                self._keep(microbatch, names, results)

        return call

    def _recompute(self, run: StageRun, microbatch: int) -> Call:
        frame = self._frame

        def call() -> None:
            leaves = frame.given(microbatch)
            run.recompute(microbatch, leaves, frame.keys[microbatch])
            if frame.meter is not None:
                _watch(frame.meter, run, microbatch, leaves)

        return call

    def _keep(self, microbatch: int, names: Sequence[str], results: Sequence[Tensor]) -> None:
        frame = self._frame
        for name, value in zip(names, results, strict=True):
            if frame.taken is None or not frame.taken(name, microbatch, value):
                frame.results[name, microbatch] = value
            if name == frame.weights[microbatch]:
                seed = value.to(frame.seeds[microbatch].dtype)
                frame.seeds[microbatch] = seed if frame.scale is None else frame.scale * seed

    def _backward(self, run: StageRun, microbatch: int, split: bool) -> Call:
        frame, program = self._frame, run.backward_input if split else run.backward
        incoming = [self._message(dst, run.index, microbatch) for dst in run.receivers]
        tangents = [
            (output, [(self._message(dst, run.index, microbatch), place) for dst, place in sources])
            for output, sources in run.tangents.items()
        ]
        returned = [self._message(run.index, src, microbatch) for src in run.returned]

        def call() -> None:
            given = {output: _total(parts) for output, parts in tangents}
            for mail in incoming:
                mail.tensors = None
            leaves = frame.given(microbatch)
            messages = program(microbatch, given, frame.seeds[microbatch], leaves, frame.keys[microbatch])
            for mail, message in zip(returned, messages, strict=True):
                mail.tensors = message
            if split and frame.meter is not None:
                _watch(frame.meter, run, microbatch, leaves)

        return call

    def _backward_weight(self, run: StageRun, microbatch: int) -> Call:
        frame = self._frame

        def call() -> None:
            leaves = frame.given(microbatch)
            run.backward_weight(microbatch, frame.seeds[microbatch], leaves, frame.keys[microbatch])

        return call

    # Communication

    def _send(self, action: Action, microbatch: int, mail: Mail) -> Call:
        frame, peer = self._frame, self._placement[action.peer or 0]

        def call() -> None:
            assert mail.tensors is not None
            mail.handle = frame.messages.send(mail.tensors, peer)
            if frame.traced:
                frame.flying[action] = mail.handle

        return call

    def _receive(self, action: Action, microbatch: int, mail: Mail) -> Call:
        frame, sender = self._frame, action.peer or 0
        peer = self._placement[sender]
        shapes = self._runs[microbatch][action.stage].message(action.kind is Kind.RECV_F, sender)
        device = frame.queue.device

        def call() -> None:
            mail.tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            mail.handle = frame.messages.receive(mail.tensors, peer)

        return call

    # End of the step

    def _bind_end_of_step(self, action: Action) -> Instruction:
        frame, stage = self._frame, action.stage
        match action.kind:
            case Kind.REDUCE_GRAD:
                return Instruction(action, None, self._reduce_over_replicas(stage), None)
            case Kind.REDUCE_TIED:
                return Instruction(action, frame.settle, self._reduce, None)
            case Kind.SYNC:
                return Instruction(action, frame.settle, self._sync, None)
            case _:
                return Instruction(action, partial(frame.settle, stage), self._step(stage), None)

    def _reduce(self) -> None:
        if not self._frame.reduced:  # one exchange serves all stages of this device
            self._tied.reduce(self._frame.backend)
            self._frame.reduced = True

    def _reduce_over_replicas(self, stage: int) -> Call:
        frame, state = self._frame, self._runs[0][stage].state

        def call() -> None:
            assert frame.replicas is not None
            reduction = frame.reductions[stage] = state.reduce_gradients(frame.replicas)
            if frame.traced and frame.queue.device.type == "cpu":  # the marks of a GPU are events of its own
                reduction.watch()

        return call

    def _sync(self) -> None:
        self._frame.update.sync(self._frame.backend)

    def _step(self, stage: int) -> Call:
        return partial(self._frame.update.step, self._runs[0][stage].state)


def _total(parts: Sequence[tuple[Mail, int]]) -> Tensor:
    """The sum of the gradients that an output gets from its readers."""
    mail, place = parts[0]
    assert mail.tensors is not None
    total = mail.tensors[place]
    for mail, place in parts[1:]:
        assert mail.tensors is not None
        total = total + mail.tensors[place]
    return total


def _watch(meter: StorageMeter, run: StageRun, microbatch: int, leaves: tuple[Any, ...]) -> None:
    ignored = run.persistent | {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
    meter.watch(run.held(microbatch), ignored)
