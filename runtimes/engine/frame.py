"""The state of the current step that a device's instructions read and write: the batch, seeds, results, marks.

Instructions are bound to a frame once. The executor fills the frame again for each step. The leaves of the batch that a
device reads are loaded a few microbatches before the actions that read them::

    host     load 0, 1, 2 │ F of 0 │ load 3 │ F of 1 │ load 4 │ …

All copies before the first launch would let the device wait for the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from ...backends.contract import Backend, Handle
from ...core.actions import Action
from ...core.capture.graph.storages import StorageMeter
from ..devices.compute import ComputeQueue
from ..optimizer.update import Update
from .messages import Transport
from .step_data import Leaves, Peaks

AHEAD = 2
"""Microbatches after the one that is read whose copies are issued."""


@define(eq=False)
class LeafLoader:
    """The leaves of one batch on one device.

    Args:
        queue: of the device.
        microbatches: of the batch.
        reads: for each microbatch the positions of the leaves that the device reads.
    """

    queue: ComputeQueue
    microbatches: Sequence[Leaves]
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
        backend: this device's end of the transport, for the end of the step.
        transport: what moves messages between stages; usually the same.
        queue: the compute queue of this device.
        update: this device's part of the optimizer step.
        loader: loads the batch's leaves that this device reads; None between steps.
        keys: the random key of each microbatch.
        seeds: for each microbatch the gradient of its loss: its share of the samples, a scalar tensor.
        weights: for each microbatch the name of the result that replaces its seed, if the step returns (loss, weight).
        scale: factor on the seeds that are computed, a scalar tensor; None for 1.
        results: (name, microbatch) → the part of the step's result computed here.
        store_result: stores a result, by name and microbatch, and returns whether ``results`` need not keep it.
        traced: whether the step is traced.
        arrivals: if the step is traced: receive → mark at which its reader had waited for it; pending action → mark at
            which it ended, or at which it was waited for if its handle does not report the end.
        started: pending action → mark at which it started, if its handle reports that and the step is traced.
        traced_sends: send → handle of its transfer, if the step is traced.
        meter: of the saved tensors; None if they are not watched.
        peaks: (stage, microbatch) → largest magnitude of each output of F (see `peaks`); None if they are not recorded.
        tied_reduced: whether the gradients of tied weights were exchanged.
        replicas: this device's end of the transport to its replicas; None for one replica.
        pending: actions of other queues than compute → handles that were not waited for yet.
    """

    backend: Backend
    transport: Transport
    queue: ComputeQueue
    update: Update
    loader: LeafLoader | None = None
    keys: Sequence[Tensor] = ()
    seeds: list[Tensor] = field(factory=list)
    weights: Sequence[str | None] = ()
    scale: Tensor | None = None
    results: dict[tuple[str, int], Tensor] = field(factory=dict)
    store_result: Callable[[str, int, Tensor], bool] | None = None
    traced: bool = False
    arrivals: dict[Action, Any] = field(factory=dict)
    started: dict[Action, Any] = field(factory=dict)
    traced_sends: dict[Action, Handle] = field(factory=dict)
    meter: StorageMeter | None = None
    peaks: Peaks | None = None
    tied_reduced: bool = False
    replicas: Backend | None = None
    pending: dict[Action, Handle] = field(factory=dict)

    def wait_pending(self, *actions: Action) -> None:
        """Wait for the pending handles of these actions, or for all if none is named."""
        for action in actions or tuple(self.pending):
            handle = self.pending.pop(action, None)
            if handle is not None:
                handle.wait()
                if self.traced:
                    ended = getattr(handle, "ended_ns", None)
                    self.arrivals[action] = self.queue.mark() if ended is None else ended
                    started = getattr(handle, "started_ns", None)
                    if started is not None:
                        self.started[action] = started

    def leaves_of(self, microbatch: int) -> tuple[Any, ...]:
        """The leaves of a microbatch; what the caller issues from now on runs after their load."""
        assert self.loader is not None
        return self.loader.of(microbatch)
