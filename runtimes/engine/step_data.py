"""What a step takes and returns on one device: inputs, options, the record of what the device did, and its `Frame`.

The peaks of a record, the largest magnitude of each tensor that a stage returns for others, are NaN or infinite if one
of its values is. They stay on the device, so that no step waits for them. They are read only after a loss that is not
finite, to find the stage and the microbatch where that began (`training/step_checks`).

Instructions read and write the frame, to which they are bound once; the executor fills it for each step. The leaves of
the batch that a device reads are loaded a few microbatches before the actions that read them::

    host     load 0, 1, 2 │ F of 0 │ load 3 │ F of 1 │ load 4 │ …

All copies before the first launch would let the device wait for the host.

There is one `Message` for each message of a step, and it is reused in every step. It holds the tensors from the action
that writes them to the action that reads them. `finished_sends` finds the sends that must have ended when a receive has
arrived, so that their tensors can be freed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...backends.contract import Backend, Handle
from ...core.actions import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from ...core.capture.graph.storages import StorageMeter
from ...core.plain_data import exchanged
from ...core.plan.plan import Plan
from ..devices.compute import ComputeQueue
from ..microbatches import Microbatch
from ..update.update import Update

MessageKey = tuple[int, int, int]
"""The sending stage, the reading stage, the microbatch."""


@define(eq=False, slots=True)
class Message:
    """A message between two stages, at one device.

    Args:
        tensors: its tensors, from the action that writes them to the one that reads them; None otherwise.
        handle: the transfer in flight; None after it was waited for.
        buffers: the memory that it is received into, if captured graphs read it; otherwise None.
    """

    tensors: list[Tensor] | None = None
    handle: Handle | None = None
    buffers: list[Tensor] | None = None

    def finish_send(self) -> None:
        """Wait for the transfer, and free the sent tensors; does nothing if no transfer is in flight."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = self.tensors = None


def finished_sends(
    plan: Plan, lowered: Sequence[Sequence[Action]], device: int
) -> dict[Action, tuple[MessageKey, ...]]:
    """For receives of one device, the messages it sent whose transfers have ended once the receive has arrived.

    A send has ended when the peer has run the action that reads the message. The next message from that peer proves it.
    So no handle is polled: gloo's handles can only be waited for.

    Args:
        device: the device that sends.
    """
    finished: dict[Action, tuple[MessageKey, ...]] = {}
    placement = plan.placement
    for peer, actions in enumerate(lowered):
        if peer == device:
            continue
        read: list[MessageKey] = []
        arrived: dict[tuple[int, int | None, bool], list[MessageKey]] = {}
        for action in actions:
            stage, kind, microbatch, other = action.stage, action.kind, action.microbatch, action.peer
            if other is not None and microbatch is not None and placement[other] == device:
                if kind in RECV_KINDS:
                    reader = stage, microbatch, kind is Kind.RECV_F
                    arrived.setdefault(reader, []).append((other, stage, microbatch))
                elif read:
                    finished[action.counterpart] = tuple(read)
                    read = []
            elif kind in COMPUTE_KINDS and kind is not Kind.W:
                read += arrived.pop((stage, microbatch, kind is Kind.F), [])
    return finished


Peaks = dict[tuple[int, int], list[Tensor | None]]
"""(stage, microbatch) → for each output of F its largest magnitude, a scalar; None for one without floats."""

_FLOATS = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip


def peaks_of(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The largest magnitude of each tensor.

    A norm neither overflows nor allocates memory of the tensor's size, as a sum and ``isfinite`` would.
    """
    places = [i for i, output in enumerate(outputs) if output.dtype in _FLOATS and output.numel()]
    found: list[Tensor | None] = [None] * len(outputs)
    if places:
        for place, peak in zip(places, torch._foreach_norm([outputs[i] for i in places], math.inf), strict=True):
            found[place] = peak
    return found


@define
class StepInputs:
    """The inputs of one step.

    Args:
        microbatches: in order.
        keys: the random key of each microbatch, on the host.
        seeds: the gradient of each microbatch's loss: its share of the samples; on the host.
        weights: for each microbatch the name of the result that replaces its seed, if the step returns (loss, weight).
        scale: factor on the seeds that are computed, a scalar of the loss's dtype, on the host; the other seeds already
            contain it; None for 1.
        clear_gradients: whether the gradients of earlier steps are cleared first; otherwise this step adds to them.
        store_result: called with each result as soon as it is computed: name, microbatch, value. Returns whether the
            record need not keep it.
    """

    microbatches: Sequence[Microbatch]
    keys: Sequence[Tensor]
    seeds: Tensor
    weights: Sequence[str | None]
    scale: Tensor | None = None
    clear_gradients: bool = True
    store_result: Callable[[str, int, Tensor], bool] | None = None


@frozen
class StepOptions:
    """How a step runs.

    Args:
        update: whether the step ends with an update; otherwise its gradients wait for more batches.
        trace: whether every action and the saved tensors are recorded. Watching these costs 1 to 4 % of the time of
            small programs.
        peaks: whether the largest magnitude of each tensor that F returns for other stages is recorded.
    """

    update: bool = True
    trace: bool = False
    peaks: bool = False


@exchanged
@define
class StepRecord:
    """What one device did in a step. All but the results and the peaks is recorded only if the step is traced.

    Args:
        results: (name, microbatch) → the part of the step's result computed here.
        start_ns, end_ns: on the monotonic clock.
        events: (action, queue, start, end, bytes) in order; a communication starts when it is posted.
        arrivals: receive → when its reader had waited for it; reduction over replicas → when it ended, or when it was
            waited for if the transport does not report its end.
        started: copy to the host or back → when it started.
        spans: send → start and end of its transfer, if the transport reports them.
        memory: samples (time, bytes) of the saved tensors alive, from their finalizers, if they are watched.
        peak_saved: the largest sample, in bytes.
        shared: bytes of the tensors that all microbatches of a stage share, of all stages; if memory is watched.
        peaks: (stage, microbatch) → largest magnitude of each output of F; None if they are not recorded.
    """

    results: dict[tuple[str, int], Tensor] = field(factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    events: list[tuple[Action, str, int, int, int]] = field(factory=list)
    arrivals: dict[Action, int] = field(factory=dict)
    started: dict[Action, int] = field(factory=dict)
    spans: dict[Action, tuple[int, int]] = field(factory=dict)
    memory: list[tuple[float, int]] = field(factory=list)
    peak_saved: int = 0
    shared: int = 0
    peaks: Peaks | None = None

    def earlier(self, ns: int) -> "StepRecord":
        """The same record on a clock that this one is ``ns`` nanoseconds ahead of; itself for 0."""
        if not ns:
            return self
        return evolve(
            self,
            start_ns=self.start_ns - ns,
            end_ns=self.end_ns - ns,
            events=[(action, queue, start - ns, end - ns, size) for action, queue, start, end, size in self.events],
            arrivals={action: at - ns for action, at in self.arrivals.items()},
            started={action: at - ns for action, at in self.started.items()},
            spans={action: (start - ns, end - ns) for action, (start, end) in self.spans.items()},
            memory=[(at - ns, alive) for at, alive in self.memory],
        )


AHEAD = 2
"""Microbatches after the one that is read whose copies are issued."""


@define(eq=False)
class LeafLoader:
    """The leaves of one batch on one device.

    Args:
        reads: for each microbatch the positions of the leaves that the device reads.
    """

    queue: ComputeQueue
    microbatches: Sequence[Microbatch]
    reads: Sequence[Sequence[int]]
    _leaves: list[tuple[Any, ...]] = field(factory=list, init=False)
    _loaded: dict[int, Any] = field(factory=dict, init=False)
    _tickets: dict[int, Any] = field(factory=dict, init=False)

    def of(self, microbatch: int) -> tuple[Any, ...]:
        """The leaves of a microbatch; what the caller issues from now on runs after their load."""
        count = len(self._leaves)
        if count <= microbatch + AHEAD and count < len(self.microbatches):
            for _ in range(min(microbatch + AHEAD + 1, len(self.microbatches)) - count):
                self._load_next()
        if self._tickets:
            for m in [m for m in self._tickets if m <= microbatch]:  # shared tensors were loaded with the first
                self.queue.loaded(self._tickets.pop(m))
        return self._leaves[microbatch]

    def _load_next(self) -> None:
        """Load the leaves of the next microbatch, each tensor once."""
        m, loaded = len(self._leaves), self._loaded
        leaves = self.microbatches[m].leaves
        missing = [i for i in self.reads[m] if id(leaves[i]) not in loaded]
        if missing:
            found, ticket = self.queue.load([leaves[i] for i in missing])
            if ticket is not None:
                self._tickets[m] = ticket
            for i, value in zip(missing, found, strict=True):
                loaded[id(leaves[i])] = value
        self._leaves.append(tuple([loaded.get(id(leaf)) for leaf in leaves]))


@define(eq=False, slots=True)
class Frame:
    """The state of the current step on one device.

    Args:
        backend: what moves messages between stages: the transport that is open, or what captures graphs.
        loader: loads the batch's leaves that this device reads; None between steps.
        seeds, scale: those of the inputs, on the device; the step's own weights replace seeds.
        record: of the step; until its end with marks of the queue in place of times.
        traced: whether arrivals and starts are recorded.
        traced_sends: send → handle of its transfer, if the step is traced.
        meter: of the saved tensors; None if they are not watched.
        tied_reduced: whether the gradients of tied weights were exchanged.
        pending: actions of other queues than compute → handles that were not waited for yet.
    """

    backend: Backend
    queue: ComputeQueue
    update: Update
    replicas: Backend | None
    loader: LeafLoader | None = None
    inputs: StepInputs = field(init=False)
    seeds: list[Tensor] = field(factory=list)
    scale: Tensor | None = None
    record: StepRecord = field(init=False)
    traced: bool = False
    traced_sends: dict[Action, Handle] = field(factory=dict)
    meter: StorageMeter | None = None
    tied_reduced: bool = False
    pending: dict[Action, Handle] = field(factory=dict)

    def wait_pending(self, *actions: Action) -> None:
        """Wait for the pending handles of these actions, or for all if none is named."""
        for action in actions or tuple(self.pending):
            handle = self.pending.pop(action, None)
            if handle is not None:
                handle.wait()
                if self.traced:
                    ended = getattr(handle, "ended_ns", None)
                    self.record.arrivals[action] = self.queue.mark() if ended is None else ended
                    started = getattr(handle, "started_ns", None)
                    if started is not None:
                        self.record.started[action] = started

    def leaves_of(self, microbatch: int) -> tuple[Any, ...]:
        """The leaves of a microbatch; what the caller issues from now on runs after their load."""
        assert self.loader is not None
        return self.loader.of(microbatch)
