"""The executor: runs one device's lowered actions in order. Threads, ranks and virtual devices all use it.

    receive queue   ──RECV_F──┐                     ┌──RECV_B──
    compute queue             └─▶ F ─┐    ...   ┌─▶ B (or I, W) ─┐        REDUCE_TIED, SYNC, STEP
    send queue                       └─SEND_F─▶                  └─SEND_B─▶

1. A receive allocates its buffers and passes them to the backend. It does not wait.
2. A compute action waits for the messages that it reads, runs its program, and stores its outputs for the sends.
3. A send passes its message to the backend and does not wait. The tensors are kept until the transfer has ended.

The calls of each action are in the folder `instructions`, the state that they share in `step_data`, the update in
``update/update``.

Programs first run on invented inputs, zeros, in a warm-up, with values that operators accept (`ValidValues`): a stage
may index with positions that an earlier stage computes, or with what it computes from them. On zeros that may be
``zeros - 1``, or memory that a permutation was to fill. A CPU then raises an error, and no later operator runs on a
CUDA device of this process.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any, Protocol

import torch
from attrs import define
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends.contract import Backend
from ...core.actions import WORK_KINDS, Action, Kind
from ...core.capture.graph.storages import StorageMeter
from ...core.trace.trace import COMPUTE_QUEUE
from ..devices.compute import ComputeQueue
from ..devices.heap import GrowingHeap
from ..offload.device_offload import DeviceOffload
from ..programs.stage_run import Stages
from ..update.stage_state import StageState
from ..update.update import Update
from ..watch.activity import Activity
from .instructions.instructions import Binder, Instruction
from .lowered_plan import LoweredPlan
from .step_data import Frame, LeafLoader, StepInputs, StepOptions, StepRecord

_DEFAULT = StepOptions()

MarkedEvent = tuple[Action, str, Any, Any, int]
"""An action, its queue, the marks of its start and end, and the bytes that it moved."""


class Graphs(Protocol):
    """The captured graphs of one device's steps of certain shapes (`step_graphs`).

    Attributes:
        runs: for each microbatch the stages that replay them, in place of the device's own.
        instructions: those up to the last compute action, which are captured.
    """

    runs: Stages
    instructions: Sequence[Instruction]

    def prepare(self, frame: Frame) -> None:
        """Capture and select what the next step replays; before its first message."""

    def alone(self) -> AbstractContextManager[Any]:
        """A context for first runs and captures, which no other device of the same GPU runs at the same time."""


@define(eq=False)
class BoundActions:
    """The actions of one device, bound for microbatches of certain shapes.

    Args:
        forward_only: whether they are of a plan without backwards.
        first_run: whether no step has run them yet.
    """

    compute: Sequence[Instruction]
    update: Sequence[Instruction]
    states: Sequence[StageState]
    runs: Stages
    reads: Sequence[Sequence[int]]
    forward_only: bool
    graphs: Graphs | None
    first_run: bool = True


class Executor:
    """Runs one device's part of a plan.

    Args:
        backend: this device's end of the transport along its pipeline.
        replicas: this device's end of the transport to its replicas; None for one replica.
        offload: copies saved tensors to the host and back; None if the plan has no such copies.
        activity: notes the current action; None to note nothing.
        graphs: creates the captured graphs of steps with backwards; None to run operators one by one.
    """

    def __init__(
        self,
        backend: Backend,
        queue: ComputeQueue,
        update: Update,
        replicas: Backend | None = None,
        offload: DeviceOffload | None = None,
        activity: Activity | None = None,
        graphs: Callable[[Stages], Graphs] | None = None,
    ) -> None:
        self._graphs, self._offload, self._activity = graphs, offload, activity or Activity()
        self._largest = {True: -1, False: -1}
        self.device = backend.device
        self.backend = backend
        self._queue = queue
        self.update = update
        self._frame = Frame(backend, queue, update, replicas)

    def bind(self, lowered: LoweredPlan, runs: Stages) -> BoundActions:
        """Bind a plan's actions to the tensors that they read and write.

        Raises:
            RequestError: no runtime knows a kind of action, a stage cannot run one, or the host has no space for the
                offloaded saved tensors.
        """
        offload = None if self._offload is None else self._offload.bind(lowered.plan, runs)
        graphs = None if lowered.plan.forward_only or self._graphs is None else self._graphs(runs)
        runs = runs if graphs is None else graphs.runs
        found = Binder(lowered, self.device, runs, self._frame, offload).instructions
        update = (i for i, one in enumerate(found) if one.action.microbatch is None and one.queue == COMPUTE_QUEUE)
        first = next(update, len(found))
        reads = [sorted({leaf for run in own.values() for leaf in run.batch}) for own in runs]
        states = [run.state for run in runs[0].values()]
        if graphs is not None:
            graphs.instructions = found[:first]
        return BoundActions(found[:first], found[first:], states, runs, reads, lowered.plan.forward_only, graphs)

    def run(
        self,
        bound: BoundActions,
        inputs: StepInputs,
        options: StepOptions = _DEFAULT,
        before_update: Callable[[StepRecord], None] | None = None,
        ready: Barrier | None = None,
    ) -> StepRecord:
        """Run one step.

        In the first run on a CPU, and in that of a larger batch, free pages return to the kernel whenever more memory
        is in use than before (`heap`): to know that takes milliseconds for each action.

        Args:
            bound: what to run. After a failure it cannot be used again: its messages may be half done.
            before_update: called once between the last compute action and the first reduction or optimizer step.
            ready: of the devices of this process, which are all prepared before one runs: what runs for the first time
                may wait for its GPU, which makes captures of other devices there invalid.
        """
        frame, queue, trace = self._frame, self._queue, options.trace
        record = self._begin(bound, inputs, options)
        returns_memory = bound.first_run and queue.device.type == "cpu"
        if returns_memory:
            size = sum(getattr(leaf, "nbytes", 0) for each in inputs.microbatches for leaf in each.leaves)
            returns_memory = size > self._largest[bound.forward_only]
            self._largest[bound.forward_only] = max(self._largest[bound.forward_only], size)
        compute = bound.compute
        if not options.update:  # replicas sum the gradients once, after the last of several batches
            compute = [one for one in compute if one.action.microbatch is not None]
        if returns_memory:
            heap = GrowingHeap()
            compute = [_then_return_memory(one, heap) for one in compute]
        with nullcontext() if bound.graphs is None else bound.graphs.alone():
            if bound.first_run and (bound.graphs is not None or self.backend.occupies_device):
                self._warm_up(bound)
            if bound.graphs is not None:
                bound.graphs.prepare(frame)
        if ready is not None:
            with suppress(BrokenBarrierError):  # another device has failed, and its messages have the reason
                ready.wait()
        bound.first_run = False
        start, events = queue.mark() if trace else None, list[MarkedEvent]()
        with torch.no_grad():
            self._run_in_order(compute, events if trace else None)
        self._end(bound, record, options.update, before_update, events if trace else None)
        if trace:
            at = queue.nanoseconds
            record.start_ns, record.end_ns = at(start), at(queue.mark())
            record.events = [(action, where, at(begin), at(end), size) for action, where, begin, end, size in events]
            record.memory = [(at(when), alive) for when, alive in record.memory]
            record.arrivals = {action: at(mark) for action, mark in record.arrivals.items()}
            record.started = {action: at(mark) for action, mark in record.started.items()}
            spans = {action: getattr(handle, "span", None) for action, handle in frame.traced_sends.items()}
            record.spans = {a: (at(span[0]), at(span[1])) for a, span in spans.items() if span is not None}
            frame.traced_sends.clear()
        return record

    def _warm_up(self, bound: BoundActions) -> None:
        """Run every program once, before this device's first message: the host waits for the device meanwhile."""
        frame, kinds = self._frame, dict[int, set[Kind]]()
        for instruction in bound.compute:
            kinds.setdefault(instruction.action.stage, set()).add(instruction.action.kind)
        found = {id(run): (m, run) for m, own in reversed([*enumerate(bound.runs)]) for run in own.values()}
        gpus = [self._queue.device] if self._queue.device.type == "cuda" else []
        shared = [state.shared for state in bound.states if state.shared is not None and state.shared.without_memory]
        with torch.no_grad(), torch.random.fork_rng(gpus), ValidValues(), ExitStack() as stack:
            for each in shared:
                stack.enter_context(each.stand_ins())
            for m, run in found.values():
                leaves = tuple(torch.zeros_like(x) if isinstance(x, Tensor) else x for x in frame.leaves_of(m))
                try:
                    run.warm_up(kinds.get(run.index, set()), leaves, frame.inputs.keys[m], frame.seeds[m])
                except (RuntimeError, IndexError, ValueError, ArithmeticError):
                    # An operator may refuse zeros, such as the inverse of a matrix; it then runs first in the step.
                    continue
                finally:
                    run.free_shared()  # they may be those of stand-ins

    def _begin(self, bound: BoundActions, inputs: StepInputs, options: StepOptions) -> StepRecord:
        """Fill the frame for a step, and return its record."""
        frame, now = self._frame, self._queue.mark
        frame.backend, frame.traced, frame.tied_reduced = self.backend, options.trace, False
        frame.pending.clear()
        frame.traced_sends.clear()
        frame.loader, frame.inputs = LeafLoader(self._queue, inputs.microbatches, bound.reads), inputs
        frame.seeds = list(self._queue.upload(inputs.seeds).unbind())
        frame.scale = None if inputs.scale is None else self._queue.upload(inputs.scale)
        frame.record = record = StepRecord(peaks={} if options.peaks else None)
        samples = record.memory  # `run` replaces the list: a tensor freed after the step adds no sample to the record
        frame.meter = StorageMeter(lambda alive: samples.append((now(), alive))) if options.trace else None
        for run in bound.runs[0].values():  # of a step that ended early
            run.free_shared()
        for state in bound.states if inputs.clear_gradients else ():
            state.clear_gradients()
        for state in bound.states:
            if state.shared is not None:  # of a step that ended early
                state.shared.free()
        return record

    def _end(
        self,
        bound: BoundActions,
        record: StepRecord,
        update: bool,
        before_update: Callable[[StepRecord], None] | None,
        events: list[MarkedEvent] | None,
    ) -> None:
        """Run what follows the last compute action: reductions and optimizer steps."""
        with torch.no_grad():
            if before_update is not None:
                self._activity.doing("the end of the step")
                before_update(record)
            if update:
                self._run_in_order(bound.update, events)
                if self.update.has_no_stage:
                    self.update.sync(self.backend)
            self._frame.wait_pending()
            self._frame.loader = None  # the caller may free the batch
            del self._frame.inputs
            for instruction in bound.compute:
                if instruction.message is not None:
                    instruction.message.finish_send()
        if self._frame.meter is not None:
            record.peak_saved = self._frame.meter.peak
            record.shared = sum(run.shared_bytes for run in bound.runs[0].values())

    def finish_reductions(self) -> None:
        """Wait until the gradients of all stages here are summed over replicas."""
        self._frame.wait_pending()

    def _run_in_order(self, instructions: Sequence[Instruction], events: list[MarkedEvent] | None) -> None:
        activity = self._activity
        if events is None:
            for action, wait, run, _, _, _ in instructions:
                activity.what = action
                activity.count += 1
                if wait is not None:
                    wait()
                run()
            return
        mark = self._queue.mark
        for action, wait, run, _, where, moved in instructions:
            activity.doing(action)
            if wait is not None:
                wait()
            start = mark()
            run()
            end = mark()
            events.append((action, where, start, end, 0 if moved is None else moved()))


def _then_return_memory(instruction: Instruction, heap: GrowingHeap) -> Instruction:
    def run() -> None:
        instruction.run()
        heap.give_back()

    return instruction._replace(run=run) if instruction.action.kind in WORK_KINDS else instruction


aten = torch.ops.aten

_POSITIONS = {"index", "indices", "target", "offsets", "offs"}
"""Names of arguments that are positions in another tensor, in the schemas of operators."""
_PROBABILITIES = {
    aten.multinomial.default, aten.bernoulli.default, aten.bernoulli.out, aten.binary_cross_entropy.default,
}  # fmt: skip
"""Operators that check their first argument on a CUDA device."""
_ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64}
"""Dtypes of positions; others are those of masks and values."""


class ValidValues(TorchDispatchMode):
    """Inside, operators index with zeros and draw by probabilities of one half; assertions hold."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASSERTIONS:
            return None
        if func in _PROBABILITIES:
            args = torch.full_like(args[0], 0.5), *args[1:]
        elif isinstance(func, torch._ops.OpOverload):
            places = [i for i, each in enumerate(func._schema.arguments) if each.name in _POSITIONS]
            if places:
                args = tuple(pytree.tree_map(_first, each) if i in places else each for i, each in enumerate(args))
                kwargs = {k: pytree.tree_map(_first, v) if k in _POSITIONS else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _first(value: Any) -> Any:
    """Position 0 for each position."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and value.dtype in _INTEGERS else value
