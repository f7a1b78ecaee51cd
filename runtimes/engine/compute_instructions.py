"""The instructions of F, B, I, W and RECOMPUTE: what they wait for, what they read, and what they leave for others."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...core.actions import Action, Kind
from ...core.capture.graph.storages import StorageMeter
from ..programs.linked_stage import LinkedStage
from .frame import Frame
from .instructions import Binder, Call, Instruction, executes
from .mail import Mail


@executes(Kind.F)
def _bind_forward(binder: Binder, action: Action) -> Instruction:
    run, microbatch = binder.run_of(action), action.microbatch or 0
    wait = _arrivals(binder, Kind.RECV_F, action.stage, microbatch, run.senders)
    return Instruction(action, _with_room(binder, run, microbatch, wait), _forward(binder, run, microbatch))


@executes(Kind.B, Kind.I)
def _bind_backward(binder: Binder, action: Action) -> Instruction:
    run, microbatch = binder.run_of(action), action.microbatch or 0
    wait = _arrivals(binder, Kind.RECV_B, action.stage, microbatch, run.receivers)
    return Instruction(action, wait, _backward(binder, run, microbatch, action.kind is Kind.I))


@executes(Kind.W)
def _bind_backward_weight(binder: Binder, action: Action) -> Instruction:
    frame, run, microbatch = binder.frame, binder.run_of(action), action.microbatch or 0

    def call() -> None:
        leaves = frame.given(microbatch)
        run.backward_weight(microbatch, frame.seeds[microbatch], leaves, frame.keys[microbatch])

    return Instruction(action, None, call)


@executes(Kind.RECOMPUTE)
def _bind_recompute(binder: Binder, action: Action) -> Instruction:
    frame, run, microbatch = binder.frame, binder.run_of(action), action.microbatch or 0

    def call() -> None:
        leaves = frame.given(microbatch)
        run.recompute(microbatch, leaves, frame.keys[microbatch])
        if frame.meter is not None:
            _watch(frame.meter, run, microbatch, leaves)

    return Instruction(action, None, call)


def _arrivals(binder: Binder, kind: Kind, stage: int, microbatch: int, senders: Sequence[int]) -> Call | None:
    """Waits for the messages from other devices, and settles the sends that are over when these have arrived."""
    frame, mark = binder.frame, binder.frame.queue.mark
    expected = []
    for sender in senders:
        if binder.placement[sender] != binder.device:
            receive = Action(stage, kind, microbatch, sender)
            finished = [binder.message(*key) for key in binder.finished.get(receive, ())]
            expected.append((receive, binder.message(sender, stage, microbatch), finished))

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


def _with_room(binder: Binder, run: LinkedStage, microbatch: int, wait: Call | None) -> Call | None:
    """Waits, before what an F waits for, until its readers are not too far behind."""
    if binder.ahead_limit is None:
        return wait
    ahead = {dst: microbatch - binder.ahead_limit(run.index, dst) for dst in run.outgoing}
    left = [
        binder.message(run.index, dst, before)
        for dst, before in ahead.items()
        if before >= 0 and binder.placement[dst] != binder.device
    ]

    def wait_for_room() -> None:
        for mail in left:
            mail.settle()
        if wait is not None:
            wait()

    return wait_for_room if left else wait


def _forward(binder: Binder, run: LinkedStage, microbatch: int) -> Call:
    frame, forward = binder.frame, run.forward
    incoming = [binder.message(src, run.index, microbatch) for src in run.senders]
    sources = [(binder.message(src, run.index, microbatch), place) for src, place in run.sources]
    outgoing = [(binder.message(run.index, dst, microbatch), places) for dst, places in run.outgoing.items()]
    names = run.results

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
            _keep(frame, microbatch, names, results)

    return call


def _keep(frame: Frame, microbatch: int, names: Sequence[str], results: Sequence[Tensor]) -> None:
    for name, value in zip(names, results, strict=True):
        if frame.taken is None or not frame.taken(name, microbatch, value):
            frame.results[name, microbatch] = value
        if name == frame.weights[microbatch]:
            seed = value.to(frame.seeds[microbatch].dtype)
            frame.seeds[microbatch] = seed if frame.scale is None else frame.scale * seed


def _backward(binder: Binder, run: LinkedStage, microbatch: int, split: bool) -> Call:
    frame = binder.frame
    program: Callable[..., list[list[Tensor]]] = run.backward_input if split else run.backward
    incoming = [binder.message(dst, run.index, microbatch) for dst in run.receivers]
    tangents = [
        (output, [(binder.message(dst, run.index, microbatch), place) for dst, place in sources])
        for output, sources in run.tangents.items()
    ]
    returned = [binder.message(run.index, src, microbatch) for src in run.returned]

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


def _total(parts: Sequence[tuple[Mail, int]]) -> Tensor:
    """The sum of the gradients that an output gets from its readers."""
    mail, place = parts[0]
    assert mail.tensors is not None
    total = mail.tensors[place]
    for mail, place in parts[1:]:
        assert mail.tensors is not None
        total = total + mail.tensors[place]
    return total


def _watch(meter: StorageMeter, run: LinkedStage, microbatch: int, leaves: tuple[Any, ...]) -> None:
    ignored = run.persistent | {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
    meter.watch(run.held(microbatch), ignored)
