"""What a pipeline keeps between two steps, in addition to the tensors of its stages."""

from attrs import define, field, frozen
from torch import Tensor

from ...core.trace.trace import Trace
from ..lazy_value import LazyValue
from .kept_gradients import KeptGradients

PROGRESS = ("steps", "updates", "evaluations", "seed")
"""The fields of the state that a checkpoint contains: random numbers depend on them."""


@frozen
class Accumulated:
    """Batches whose gradients are accumulated for a later update.

    Args:
        samples: of the first batch; the sizes of the others are relative to it.
        divisor: divisor of the accumulated gradients: the sum of the step's weights, or of the relative sizes of the
            batches.
        scale: the factor on all their losses, fixed when the first batch ran; None for 1.
        finite: whether all their losses are finite, if updates depend on it.
        kept: the gradients; None before the first batch has run.
    """

    samples: int
    divisor: float
    scale: float | None
    finite: bool = True
    kept: KeptGradients | None = field(default=None, repr=False)


@define(eq=False)
class PipelineState:
    """The state of a pipeline between two steps.

    Args:
        seed: of all random numbers.
        steps: batches so far.
        updates: optimizer steps so far; skipped ones do not count.
        evaluations: forwards without an update so far; they have random numbers of their own.
        visits: calls of `panpipe.weights.on_parameters` since the last step.
        accumulated: the batches whose gradients wait for an update; None if no gradients wait.
        norm: the global norm of the last update's gradients, before clipping; None without ``clip_norm``.
        skipped: whether the last update was skipped because a gradient or the loss was not finite.
        metrics: the other parts of the last batch's result.
        trace: of the last traced step; None if there is none.
    """

    seed: int = 0
    steps: int = 0
    updates: int = 0
    evaluations: int = 0
    visits: int = 0
    accumulated: Accumulated | None = None
    norm: Tensor | None = None
    skipped: bool = False
    metrics: LazyValue[dict[str, float]] = field(factory=lambda: LazyValue(dict), repr=False)
    trace: Trace | None = field(default=None, repr=False)
