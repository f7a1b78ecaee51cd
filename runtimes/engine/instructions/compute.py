"""The instructions of F, B, I, W and RECOMPUTE: what they wait for, read and write."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....core.actions import Action, Kind
from ....core.capture.graph.storages import StorageMeter
from ...programs.stage_run import StageRun
from ..step_data import Frame, Message, peaks_of
from .instructions import Binder, Call, Instruction, executes


@executes(Kind.F)
def _bind_forward(binder: Binder, action: Action) -> Instruction:
    run, microbatch = binder.run_of(action), action.microbatch or 0
    wait = _arrivals(binder, Kind.RECV_F, action.stage, microbatch, run.senders)
    return Instruction(action, wait, _forward(binder, run, microbatch))


@executes(Kind.B, Kind.I)
def _bind_backward(binder: Binder, action: Action) -> Instruction:
    run, microbatch = binder.run_of(action), action.microbatch or 0
    wait = _arrivals(binder, Kind.RECV_B, action.stage, microbatch, run.receivers)
    return Instruction(action, wait, _backward(binder, run, microbatch, action.kind))


@executes(Kind.W)
def _bind_backward_weight(binder: Binder, action: Action) -> Instruction:
    frame, run, microbatch = binder.frame, binder.run_of(action), action.microbatch or 0

    def call() -> None:
        leaves = frame.leaves_of(microbatch)
        run.backward_weight(microbatch, frame.seeds[microbatch], leaves, frame.inputs.keys[microbatch])

    return Instruction(action, None, call)


@executes(Kind.RECOMPUTE)
def _bind_recompute(binder: Binder, action: Action) -> Instruction:
    frame, run, microbatch = binder.frame, binder.run_of(action), action.microbatch or 0

    def call() -> None:
        leaves = frame.leaves_of(microbatch)
        run.recompute(microbatch, leaves, frame.inputs.keys[microbatch])
        if frame.meter is not None:
            _watch(frame.meter, run, microbatch, leaves)

    return Instruction(action, None, call)


def _arrivals(binder: Binder, kind: Kind, stage: int, microbatch: int, senders: Sequence[int]) -> Call | None:
    """Waits for the messages from other devices, and frees the sends that these arrivals prove to have ended."""
    frame, mark = binder.frame, binder.frame.queue.mark
    expected = []
    for sender in senders:
        if binder.placement[sender] != binder.device:
            receive = Action(stage, kind, microbatch, sender)
            finished = [binder.message(*key) for key in binder.finished.get(receive, ())]
            expected.append((receive, binder.message(sender, stage, microbatch), finished))

    def wait() -> None:
        for receive, message, finished in expected:
            handle, message.handle = message.handle, None
            assert handle is not None
            handle.wait()
            if frame.traced:
                frame.record.arrivals[receive] = mark()
            for sent in finished:
                sent.finish_send()

    return wait if expected else None


def _forward(binder: Binder, run: StageRun, microbatch: int) -> Call:
    frame, forward = binder.frame, run.forward
    incoming = [binder.message(src, run.index, microbatch) for src in run.senders]
    sources = [(binder.message(src, run.index, microbatch), place) for src, place in run.sources]
    outgoing = [(binder.message(run.index, dst, microbatch), places) for dst, places in run.outgoing.items()]
    names = run.results

    def call() -> None:
        boundary = [message.tensors[place] for message, place in sources if message.tensors is not None]
        for message in incoming:
            message.tensors = None
        leaves = frame.leaves_of(microbatch)
        outputs, results = forward(microbatch, boundary, leaves, frame.inputs.keys[microbatch])
        for message, places in outgoing:
            message.tensors = [outputs[place] for place in places]
        peaks = frame.record.peaks
        if peaks is not None and outputs:
            peaks[run.index, microbatch] = peaks_of(outputs)
        if frame.meter is not None:
            _watch(frame.meter, run, microbatch, leaves)
        if names:
            _store(frame, microbatch, names, results)

    return call


def _store(frame: Frame, microbatch: int, names: Sequence[str], results: Sequence[Tensor]) -> None:
    store, weight = frame.inputs.store_result, frame.inputs.weights[microbatch]
    for name, value in zip(names, results, strict=True):
        if store is None or not store(name, microbatch, value):
            frame.record.results[name, microbatch] = value
        if name == weight:
            seed = value.to(frame.seeds[microbatch].dtype)
            frame.seeds[microbatch] = seed if frame.scale is None else frame.scale * seed


def _backward(binder: Binder, run: StageRun, microbatch: int, kind: Kind) -> Call:
    frame, program = binder.frame, run.backward if kind is Kind.B else run.backward_input
    incoming = [binder.message(dst, run.index, microbatch) for dst in run.receivers]
    tangents = [
        (output, [(binder.message(dst, run.index, microbatch), place) for dst, place in sources])
        for output, sources in run.tangents.items()
    ]
    returned = [binder.message(run.index, src, microbatch) for src in run.returned]

    def call() -> None:
        gradients = {output: _total(parts) for output, parts in tangents}
        for message in incoming:
            message.tensors = None
        leaves = frame.leaves_of(microbatch)
        sent = program(microbatch, gradients, frame.seeds[microbatch], leaves, frame.inputs.keys[microbatch])
        for message, tensors in zip(returned, sent, strict=True):
            message.tensors = tensors
        if frame.meter is not None and kind is Kind.I:
            _watch(frame.meter, run, microbatch, leaves)

    return call


def _total(parts: Sequence[tuple[Message, int]]) -> Tensor:
    """The sum of the gradients of an output, one from each of its readers."""
    message, place = parts[0]
    assert message.tensors is not None
    total = message.tensors[place]
    for message, place in parts[1:]:
        assert message.tensors is not None
        total = total + message.tensors[place]
    return total


def _watch(meter: StorageMeter, run: StageRun, microbatch: int, leaves: tuple[Any, ...]) -> None:
    ignored = run.persistent | {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
    meter.watch(run.held(microbatch), ignored)
