"""The executor: walks one device's lowered actions. Every process model runs this one.

    receive queue   ──RECV_F──┐                     ┌──RECV_B──
    compute queue             └─▶ F ─┐    ...   ┌─▶ B (or I, W) ─┐        REDUCE_TIED, SYNC, STEP
    send queue                       └─SEND_F─▶                  └─SEND_B─▶

1. A receive is posted when its turn comes: buffers are made, the backend gets them, and nobody waits.
2. A compute action waits for the messages that it reads, runs its program, and leaves what it made for its sends.
3. A send hands the message to the backend and goes on; the tensors are kept until the transfer is known to be over.

What each of these calls is made of is in `instructions`, what they share, in `mail` and `frame`; what an update is made
of, in `update`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import define, field
from torch import Tensor

from ...backends.contract import Backend
from ...core.actions import WORK_KINDS, Action, Kind
from ...core.capture.graph.storages import StorageMeter
from ...core.plan.lowering import Lowered
from ...core.plan.plan import Plan
from ...core.plan.validation.progress import AheadLimit
from ...core.trace.trace import COMPUTE_QUEUE
from ..devices.compute import ComputeQueue
from ..devices.heap import give_back_freed_memory
from ..optimizer.state import StageState
from ..optimizer.update import Ending, Update
from ..programs.linked_stage import LinkedStage
from . import compute_instructions, message_instructions, step_end_instructions  # noqa: F401 - register theirs
from .frame import Frame
from .instructions import Binder, Instruction
from .mail import Transport
from .tied import TiedReduction


class Leaves(Protocol):
    """A microbatch, as far as the executor looks at it."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The batch's leaves, with the microbatch's rows."""


@define
class StepInputs:
    """What one step works on.

    Args:
        microbatches: in order.
        keys: the random key of each, on the host.
        seeds: the gradient that each microbatch's loss starts with: its share of the samples; on the host.
        weights: for each, the name of the result that takes the seed's place, where the step returns (loss, weight).
        scale: what seeds that are computed are multiplied by, a scalar of the loss's dtype, on the host; the others
            are already; None for 1.
        fresh: whether gradients begin with this step; else they are added to those of the steps before.
        taken: takes a result that is computed, by name and microbatch, as soon as it is there, and tells whether it
            did; the others are kept until the end of the step.
    """

    microbatches: Sequence[Leaves]
    keys: Sequence[Tensor]
    seeds: Tensor
    weights: Sequence[str | None]
    scale: Tensor | None = None
    fresh: bool = True
    taken: Callable[[str, int, Tensor], bool] | None = None


@define
class StepRecord:
    """What one device did in a step.

    Args:
        results: (name, microbatch) → the part of the step's result computed here.
        start_ns, end_ns: on the monotonic clock, when the step is traced.
        events: (action, queue, start, end, bytes) in order, when the step is traced; a communication starts when it is
            posted.
        arrivals: receive → when its reader had waited for it, when the step is traced; reduction over replicas → when
            it was over, or where the transport does not tell, had been waited for.
        spans: send → start and end of its transfer, where the transport tells and the step is traced.
        memory: samples (time, bytes) of the saved tensors alive, from their finalizers, when they are watched.
        peak_saved: the most of them.
    """

    results: dict[tuple[str, int], Tensor]
    start_ns: int = 0
    end_ns: int = 0
    events: list[tuple[Action, str, int, int, int]] = field(factory=list)
    arrivals: dict[Action, int] = field(factory=dict)
    spans: dict[Action, tuple[int, int]] = field(factory=dict)
    memory: list[tuple[float, int]] = field(factory=list)
    peak_saved: int = 0


Note = tuple[Action, str, Any, Any, int]
"""An action, its queue, the marks of its start and end, and the bytes that it moves."""


@define(eq=False)
class Bound:
    """The actions of one device, bound for microbatches of certain shapes.

    Args:
        compute: up to the update: all but tied reductions, SYNC and STEP.
        update: tied reductions and optimizer steps.
        states: of this device's stages.
        reads: for each microbatch the positions of the leaves that are read here.
        fresh: whether no step has run them yet.
    """

    compute: Sequence[Instruction]
    update: Sequence[Instruction]
    states: Sequence[StageState]
    reads: Sequence[Sequence[int]]
    fresh: bool = True


class Executor:
    """Runs one device's part of a plan.

    Args:
        plan: where stages are.
        backend: this device's end of the transport.
        queue: where it computes.
        tied: reduces the gradients of tied weights.
        update: this device's part of it.
        replicas: this device's end to its replicas; None where there is one pipeline.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        queue: ComputeQueue,
        tied: TiedReduction,
        update: Update,
        replicas: Backend | None = None,
    ) -> None:
        self.device = backend.device
        self.backend = backend
        self._queue = queue
        self._tied = tied
        self.update = update
        self._frame = Frame(backend, backend, queue, update, replicas=replicas)

    def bind(
        self,
        plan: Plan,
        lowered: Lowered,
        runs: Sequence[Mapping[int, LinkedStage]],
        ahead_limit: AheadLimit | None = None,
    ) -> Bound:
        """Bind a plan's actions to what they work on.

        Args:
            plan: the plan.
            lowered: the lowered actions of all devices.
            runs: for each microbatch, this device's stages by index.
            ahead_limit: how far stages may run ahead of their readers; None for no limit.
        """
        found = Binder(plan, lowered, self.device, runs, self._tied, self._frame, ahead_limit).instructions
        update = (i for i, one in enumerate(found) if one.action.kind.whole_step and one.queue == COMPUTE_QUEUE)
        first = next(update, len(found))
        reads = [sorted({leaf for run in own.values() for leaf in run.batch}) for own in runs]
        return Bound(found[:first], found[first:], [run.state for run in runs[0].values()], reads)

    def run(
        self,
        bound: Bound,
        inputs: StepInputs,
        *,
        trace: bool = False,
        watch: bool = False,
        ending: Ending = Ending.STEP,
        before_update: Callable[[StepRecord], None] | None = None,
    ) -> StepRecord:
        """Run one step. On the host, every action of a first one is followed by giving back what is free (see `heap`).

        Args:
            bound: what to run; after a failure it is of no more use, for the mail in it.
            inputs: what the step works on.
            trace: record every action.
            watch: record the saved tensors of a step that is traced, too, from their finalizers. That costs time: 1 to
                4 % of small programs.
            ending: what is done behind the last compute action.
            before_update: called once between the last compute action and the first reduction or optimizer step.
        """
        frame, queue = self._frame, self._queue
        record = self.begin(bound, inputs, queue.mark if watch else None)
        frame.traced = trace
        give_back = bound.fresh and queue.device.type == "cpu"
        compute = bound.compute
        if ending is Ending.KEEP:  # sums over replicas are of the gradients of all batches
            compute = [one for one in compute if not one.action.kind.whole_step]
        if give_back:
            compute = [_then_give_back(one) for one in compute]
        bound.fresh = False
        start, notes = queue.mark() if trace else None, list[Note]()
        with torch.no_grad():
            self._walk(compute, notes, trace)
        self.end(bound, record, ending=ending, before_update=before_update, notes=notes if trace else None)
        if trace:
            at = queue.nanoseconds
            record.start_ns, record.end_ns = at(start), at(queue.mark())
            record.events = [(action, where, at(begin), at(end), size) for action, where, begin, end, size in notes]
            record.memory = [(at(when), alive) for when, alive in record.memory]
            record.arrivals = {action: at(mark) for action, mark in frame.arrivals.items()}
            spans = {action: getattr(handle, "span", None) for action, handle in frame.flying.items()}
            record.spans = {a: (at(span[0]), at(span[1])) for a, span in spans.items() if span is not None}
            frame.flying = {}
        return record

    def begin(
        self, bound: Bound, inputs: StepInputs, now: Callable[[], Any] | None, messages: Transport | None = None
    ) -> StepRecord:
        """Make the instructions ready for a step.

        Args:
            bound: what runs.
            inputs: what the step works on.
            now: the time for samples of memory; None where the saved tensors are not watched.
            messages: moves those between stages; the backend by default.
        """
        frame = self._frame
        frame.backend, frame.reduced = self.backend, False
        frame.pending.clear()
        frame.messages = self.backend if messages is None else messages
        self._load(bound, inputs)
        frame.keys, frame.weights = inputs.keys, inputs.weights
        frame.seeds = list(self._queue.upload(inputs.seeds).unbind())
        frame.scale = None if inputs.scale is None else self._queue.upload(inputs.scale)
        frame.results, frame.arrivals, frame.flying = {}, {}, {}
        frame.taken = inputs.taken
        record = StepRecord(frame.results)
        frame.traced = False
        samples = record.memory  # one that dies behind the step finds another list there
        frame.meter = None if now is None else StorageMeter(lambda alive: samples.append((now(), alive)))
        for state in bound.states if inputs.fresh else ():
            state.clear_gradients()
        return record

    def _load(self, bound: Bound, inputs: StepInputs) -> None:
        """Bring what this device reads of the batch to it, each tensor once."""
        here: dict[int, Any] = {}
        self._frame.leaves, self._frame.loading = [], {}
        for m, (piece, reads) in enumerate(zip(inputs.microbatches, bound.reads, strict=True)):
            fresh = [i for i in reads if id(piece.leaves[i]) not in here]
            if fresh:
                found, ticket = self._queue.load([piece.leaves[i] for i in fresh])
                if ticket is not None:
                    self._frame.loading[m] = ticket
                here.update({id(piece.leaves[i]): value for i, value in zip(fresh, found, strict=True)})
            self._frame.leaves.append(tuple(here.get(id(leaf)) for leaf in piece.leaves))

    def end(
        self,
        bound: Bound,
        record: StepRecord,
        *,
        ending: Ending,
        before_update: Callable[[StepRecord], None] | None = None,
        notes: list[Note] | None = None,
    ) -> None:
        """What comes behind the last compute action: reductions and optimizer steps. Arguments as of `run`."""
        self._frame.backend = self.backend
        with torch.no_grad():
            if before_update is not None:
                before_update(record)
            self._walk(_until(bound.update, ending), [] if notes is None else notes, notes is not None)
            if self.update.has_no_stage and ending is not Ending.KEEP:
                self.update.sync(self.backend)
            self._frame.settle()
            self._frame.leaves = []  # the batch is the caller's to keep
            for instruction in bound.compute:
                if instruction.mail is not None:
                    instruction.mail.settle()
        if self._frame.meter is not None:
            record.peak_saved = self._frame.meter.peak

    def finish_reductions(self) -> None:
        """Wait until all stages here have the sums of their gradients over replicas."""
        self._frame.settle()

    def _walk(self, instructions: Sequence[Instruction], notes: list[Note], trace: bool) -> None:
        if not trace:
            for _, wait, run, _, _, _ in instructions:
                if wait is not None:
                    wait()
                run()
            return
        mark = self._queue.mark
        for action, wait, run, _, where, moved in instructions:
            if wait is not None:
                wait()
            start = mark()
            run()
            end = mark()
            notes.append((action, where, start, end, 0 if moved is None else moved()))


def _until(update: Sequence[Instruction], ending: Ending) -> Sequence[Instruction]:
    """What of an update a step ends with."""
    if ending is Ending.REDUCE:
        return [one for one in update if one.action.kind is not Kind.STEP]
    return update if ending is Ending.STEP else ()


def _then_give_back(instruction: Instruction) -> Instruction:
    def run() -> None:
        instruction.run()
        give_back_freed_memory()

    return instruction._replace(run=run) if instruction.action.kind in WORK_KINDS else instruction
