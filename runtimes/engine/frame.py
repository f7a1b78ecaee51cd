"""What the instructions of a device know of the step under way: the batch, seeds, results, marks.

Instructions are bound to a frame once; it is filled in anew for every step.
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
from .mail import Transport


@define(eq=False, slots=True)
class Frame:
    """What instructions know of the step under way.

    Args:
        backend: this device's end of the transport, for the end of the step.
        messages: its end of what moves messages between stages; mostly the same.
        queue: where this device computes.
        leaves: of each microbatch, those that are read here; use `given`.
        loading: microbatch → what the queue waits for before its leaves are read, until it has.
        keys: the random key of each.
        seeds: the gradient that each microbatch's loss starts with: its share of the samples, a scalar tensor.
        weights: for each, the name of the result that takes the seed's place, where the step returns (loss, weight).
        scale: what it is multiplied by there, a scalar tensor; None for 1.
        results: (name, microbatch) → the part of the step's result computed here.
        taken: takes such a part instead, if it does.
        traced: whether arrivals are recorded.
        arrivals: when the step is traced: receive → the mark at which its reader had waited for it; what was pending →
            that at which it was over, or where nothing reports that, at which it was waited for.
        flying: send → its transfer, when the step is traced.
        meter: of the saved tensors, when they are watched.
        reduced: whether the gradients of tied weights were exchanged.
        update: this device's part of it.
        replicas: this device's end to its replicas; None where there are none.
        pending: what actions on other queues than compute have under way, that nobody has waited for yet.
    """

    backend: Backend
    messages: Transport
    queue: ComputeQueue
    update: Update
    leaves: list[tuple[Any, ...]] = field(factory=list)
    loading: dict[int, Any] = field(factory=dict)
    keys: Sequence[Tensor] = ()
    seeds: list[Tensor] = field(factory=list)
    weights: Sequence[str | None] = ()
    scale: Tensor | None = None
    results: dict[tuple[str, int], Tensor] = field(factory=dict)
    taken: Callable[[str, int, Tensor], bool] | None = None
    traced: bool = False
    arrivals: dict[Action, Any] = field(factory=dict)
    flying: dict[Action, Handle] = field(factory=dict)
    meter: StorageMeter | None = None
    reduced: bool = False
    replicas: Backend | None = None
    pending: dict[Action, Handle] = field(factory=dict)

    def settle(self, *actions: Action) -> None:
        """Wait for what these actions have under way, or for everything that is."""
        for action in actions or tuple(self.pending):
            handle = self.pending.pop(action, None)
            if handle is not None:
                handle.wait()
                if self.traced:
                    ended = getattr(handle, "ended_ns", None)
                    self.arrivals[action] = self.queue.mark() if ended is None else ended

    def given(self, microbatch: int) -> tuple[Any, ...]:
        """The leaves of a microbatch, there to be read."""
        if self.loading:
            for m in [m for m in self.loading if m <= microbatch]:  # a tensor that all share came with the first
                self.queue.loaded(self.loading.pop(m))
        return self.leaves[microbatch]
