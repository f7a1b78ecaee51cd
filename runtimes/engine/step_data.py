"""What a step takes and returns on one device: its inputs, its options, and the record of what the device did.

The peaks of a record, the largest magnitude of each tensor that a stage returns for others, are NaN or infinite if one
of its values is. They stay on the device, so that no step waits for them. They are read only after a loss that is not
finite, to find the stage and the microbatch where that began (`training/step_checks`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.actions import Action
from ...core.plain_data import exchanged
from ..optimizer.update import Ending

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


class Leaves(Protocol):
    """The part of a microbatch that the executor uses."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The batch's leaves, with the microbatch's rows."""


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

    microbatches: Sequence[Leaves]
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
        ending: what is done with the gradients.
        trace: whether every action is recorded.
        watch: whether the saved tensors are recorded.
        peaks: whether the largest magnitude of each tensor that F returns for other stages is recorded.
    """

    ending: Ending = Ending.STEP
    trace: bool = False
    watch: bool = False
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

    results: dict[tuple[str, int], Tensor]
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
