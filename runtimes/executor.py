"""The executor: walks one device's lowered actions. Every process model runs this one.

    receive queue   ──RECV_F──┐                     ┌──RECV_B──
    compute queue             └─▶ F ─┐    ...   ┌─▶ B (or I, W) ─┐        REDUCE_TIED, STEP
    send queue                       └─SEND_F─▶                  └─SEND_B─▶

1. A receive is posted when its turn comes: buffers are made, the backend gets them, and nobody waits.
2. A compute action waits for the messages that it reads, runs its program, and leaves what it made for its sends.
3. A send hands the message to the backend and goes on; the tensors are kept until the transfer is known to be over.
   It is over, without asking, once a later message arrives that the reader sent after it had read this one
   (`_finished_sends`): gloo's handles can only be waited for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from attrs import define, field
from torch import Tensor

from ..backends.contract import Backend, Handle
from ..core.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from ..core.capture.storages import StorageMeter
from ..core.plan import Plan
from ..core.trace import COMPUTE_QUEUE, receive_queue, send_queue
from .microbatches import Microbatch
from .stage_run import StageRun
from .tied import TiedReduction


@define
class StepInputs:
    """What one step works on.

    Args:
        microbatches: in order.
        keys: the random key of each.
        seeds: the gradient that each microbatch's loss starts with: its share of the samples, a scalar tensor.
        weight: name of the result that takes the seed's place, for a step that returns (loss, weight).
    """

    microbatches: Sequence[Microbatch]
    keys: Sequence[Tensor]
    seeds: list[Tensor]
    weight: str | None = None


@define
class StepRecord:
    """What one device did in a step.

    Args:
        results: (name, microbatch) → the part of the step's result computed here.
        start_ns, end_ns: on the monotonic clock.
        events: (action, queue, start, end, bytes) in order, when the step is traced; a communication starts when it is
            posted.
        arrivals: receive → when its reader had waited for it, when the step is traced.
        memory: samples of the saved tensors alive, from their finalizers, when the step is traced.
        peak_saved: the most of them.
    """

    results: dict[tuple[str, int], Tensor] = field(factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    events: list[tuple[Action, str, int, int, int]] = field(factory=list)
    arrivals: dict[Action, int] = field(factory=dict)
    memory: list[tuple[int, int]] = field(factory=list)
    peak_saved: int = 0


class Message(NamedTuple):
    """A send or receive of one device: (stage, microbatch, peer stage) is its key, together with the direction.

    Args:
        stage, kind, microbatch, peer: of the action.
        device: the peer stage's.
        forward: whether it goes from an earlier to a later stage.
        finished: keys of this device's sends that are over once this receive is.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int
    device: int
    forward: bool
    finished: tuple[tuple[int, int, int], ...]


Instruction = tuple[Action, Callable[[Any], int], Any]


class Executor:
    """One device's part of a plan.

    Args:
        plan: the plan.
        lowered: the lowered actions of all devices.
        backend: this device's end of the transport.
        tied: reduces the gradients of tied weights.
    """

    def __init__(self, plan: Plan, lowered: Sequence[Sequence[Action]], backend: Backend, tied: TiedReduction) -> None:
        self.plan = plan
        self.device = backend.device
        self.backend = backend
        self._tied = tied
        self._placement = plan.placement
        self._finished = _finished_sends(plan, lowered, self.device)
        self._instructions = [self._instruction(action) for action in lowered[self.device]]

    def _instruction(self, action: Action) -> Instruction:
        """An action as a method and what it needs, so that nothing is looked up while the step runs."""
        stage, kind, microbatch, peer = action.stage, action.kind, action.microbatch or 0, action.peer
        if peer is not None:
            forward = kind in (Kind.SEND_F, Kind.RECV_F)
            finished = self._finished.get(action, ())
            message = Message(stage, kind, microbatch, peer, self._placement[peer], forward, finished)
            return action, self._send if kind in SEND_KINDS else self._receive, message
        methods: dict[Kind, Callable[[Any], int]] = {
            Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward_input,
            Kind.W: self._backward_weight, Kind.REDUCE_TIED: self._reduce_tied, Kind.STEP: self._step,
        }  # fmt: skip
        return action, methods[kind], (stage, microbatch)

    def run(
        self, runs: Sequence[Mapping[int, StageRun]], inputs: StepInputs, *, trace: bool = False, update: bool = True,
        before_update: Callable[[StepRecord], None] | None = None,
    ) -> StepRecord:  # fmt: skip
        """Run one step.

        Args:
            runs: for each microbatch, this device's stages by index.
            inputs: what the step works on.
            trace: record every action, and watch the saved tensors.
            update: step the optimizers; without it the gradients are reduced and left.
            before_update: called once between the last compute action and the first reduction or optimizer step.
        """
        self._runs, self._inputs, self._record = runs, inputs, StepRecord()
        self._inbox: dict[tuple[int, int, int], tuple[list[Tensor], Handle | None, Message | None]] = {}
        self._outbox: dict[tuple[int, int, int], list[Tensor]] = {}
        self._sending: dict[tuple[int, int, int], tuple[Handle, list[Tensor]]] = {}
        self._meter = self._new_meter() if trace else None
        for run in runs[0].values():
            run.state.clear_gradients()
        self._reduced = False
        updating = False
        record, clock = self._record, time.perf_counter_ns
        record.start_ns = clock()
        with torch.no_grad():
            for action, method, argument in self._instructions:
                if not updating and action.microbatch is None:
                    updating = True
                    if before_update is not None:
                        before_update(record)
                if action.kind is Kind.STEP and not update:
                    continue
                start = method(argument)
                if trace:
                    self._note(action, start, clock())
            for handle, _ in self._sending.values():
                handle.wait()
        record.end_ns = clock()
        if self._meter is not None:
            record.peak_saved = self._meter.peak
        return record

    # Compute

    def _forward(self, where: tuple[int, int]) -> int:
        stage, microbatch = where
        run = self._runs[microbatch][stage]
        messages = {src: self._arrived(stage, microbatch, src) for src in run.senders}
        start = time.perf_counter_ns()
        boundary = [messages[src][place] for src, place in run.sources]
        inputs = self._inputs
        leaves = inputs.microbatches[microbatch].leaves
        outputs, results = run.forward(microbatch, boundary, leaves, inputs.keys[microbatch])
        if self._meter is not None:
            self._watch(run, microbatch, leaves)
        for name, value in zip(run.programs.results, results, strict=True):
            self._record.results[name, microbatch] = value
            if name == inputs.weight:
                inputs.seeds[microbatch] = value.to(inputs.seeds[microbatch].dtype)
        for dst, places in run.outgoing.items():
            self._leave(stage, dst, microbatch, [outputs[i] for i in places])
        return start

    def _backward(self, where: tuple[int, int]) -> int:
        return self._backwards(where, split=False)

    def _backward_input(self, where: tuple[int, int]) -> int:
        return self._backwards(where, split=True)

    def _backwards(self, where: tuple[int, int], split: bool) -> int:
        stage, microbatch = where
        run = self._runs[microbatch][stage]
        messages = {dst: self._arrived(stage, microbatch, dst) for dst in run.receivers}
        start = time.perf_counter_ns()
        tangents = {}
        for output, sources in run.tangents.items():
            (dst, place), *rest = sources
            total = messages[dst][place]
            for dst, place in rest:
                total = total + messages[dst][place]
            tangents[output] = total
        inputs = self._inputs
        leaves = inputs.microbatches[microbatch].leaves
        program = run.backward_input if split else run.backward
        gradients = program(microbatch, tangents, inputs.seeds[microbatch], leaves, inputs.keys[microbatch])
        if split and self._meter is not None:
            self._watch(run, microbatch, leaves)
        for src in run.returned:
            self._leave(stage, src, microbatch, run.gradient_message(src, gradients))
        return start

    def _backward_weight(self, where: tuple[int, int]) -> int:
        start = time.perf_counter_ns()
        stage, microbatch = where
        inputs = self._inputs
        leaves = inputs.microbatches[microbatch].leaves
        run = self._runs[microbatch][stage]
        run.backward_weight(microbatch, inputs.seeds[microbatch], leaves, inputs.keys[microbatch])
        return start

    # Communication

    def _arrived(self, stage: int, microbatch: int, source: int) -> list[Tensor]:
        """The message of stage ``source`` for (stage, microbatch), waited for."""
        buffers, handle, message = self._inbox.pop((stage, microbatch, source))
        if handle is not None and message is not None:
            handle.wait()
            if self._meter is not None:
                action = Action(stage, message.kind, microbatch, source)
                self._record.arrivals[action] = time.perf_counter_ns()
            for finished in message.finished:
                self._sending.pop(finished)[0].wait()
        return buffers

    def _leave(self, stage: int, peer: int, microbatch: int, tensors: list[Tensor]) -> None:
        """Leave a message for its send, or for the reader where that is on this device."""
        if self._placement[peer] == self.device:
            self._inbox[peer, microbatch, stage] = tensors, None, None
        else:
            self._outbox[stage, microbatch, peer] = tensors

    def _send(self, message: Message) -> int:
        start = time.perf_counter_ns()
        key = message.stage, message.microbatch, message.peer
        tensors = self._outbox.pop(key)
        self._sending[key] = self.backend.send(tensors, message.device), tensors
        return start

    def _receive(self, message: Message) -> int:
        start = time.perf_counter_ns()
        stage, microbatch, peer = message.stage, message.microbatch, message.peer
        shapes = self._runs[microbatch][stage].message(message.forward, peer)
        buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        self._inbox[stage, microbatch, peer] = buffers, self.backend.receive(buffers, message.device), message
        return start

    # End of the step

    def _reduce_tied(self, where: tuple[int, int]) -> int:
        start = time.perf_counter_ns()
        if not self._reduced:  # one exchange serves all stages of this device
            self._tied.reduce(self.backend)
            self._reduced = True
        return start

    def _step(self, where: tuple[int, int]) -> int:
        start = time.perf_counter_ns()
        self._runs[0][where[0]].state.step()
        return start

    # Records

    def _new_meter(self) -> StorageMeter:
        record = self._record
        return StorageMeter(lambda alive: record.memory.append((time.perf_counter_ns(), alive)))

    def _watch(self, run: StageRun, microbatch: int, leaves: tuple[Any, ...]) -> None:
        assert self._meter is not None
        ignored = run.persistent | {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
        self._meter.watch(run.held(microbatch), ignored)

    def _note(self, action: Action, start: int, end: int) -> None:
        queue, size = COMPUTE_QUEUE, 0
        if action.peer is not None and action.microbatch is not None:
            peer = self._placement[action.peer]
            run = self._runs[action.microbatch][action.stage]
            if action.kind in SEND_KINDS:
                queue, tensors = send_queue(peer), self._sending[action.stage, action.microbatch, action.peer][1]
                size = sum(tensor.nbytes for tensor in tensors)
            else:
                queue, message = receive_queue(peer), run.message(action.kind is Kind.RECV_F, action.peer)
                size = sum(prod(shape) * dtype.itemsize for shape, dtype in message)
        self._record.events.append((action, queue, start, end, size))


def _finished_sends(
    plan: Plan, lowered: Sequence[Sequence[Action]], device: int
) -> dict[Action, tuple[tuple[int, int, int], ...]]:
    """For receives of one device: which of its own sends, by key, are over once the receive is.

    A send from this device is over when the peer has run the action that reads it. The first message that the peer
    sends back afterwards proves it.
    """
    found: dict[Action, tuple[tuple[int, int, int], ...]] = {}
    placement = plan.placement
    for peer, actions in enumerate(lowered):
        if peer == device:
            continue
        read: list[tuple[int, int, int]] = []
        arrived: dict[tuple[int, int | None, bool], list[tuple[int, int, int]]] = {}
        for action in actions:
            stage, kind, microbatch, other = action.stage, action.kind, action.microbatch, action.peer
            if other is not None and microbatch is not None and placement[other] == device:
                if kind in RECV_KINDS:
                    key = stage, microbatch, kind is Kind.RECV_F
                    arrived.setdefault(key, []).append((other, microbatch, stage))
                elif read:
                    found[action.counterpart] = tuple(read)
                    read = []
            elif kind in COMPUTE_KINDS and kind is not Kind.W:
                read += arrived.pop((stage, microbatch, kind is Kind.F), [])
    return found
