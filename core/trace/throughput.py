"""Throughput of a step: samples and tokens per second, and the model FLOPs utilisation."""

from collections.abc import Sequence

from attrs import frozen


@frozen
class StepTotals:
    """Samples, tokens and FLOPs of one step of one pipeline; fields that are not known are None.

    Args:
        samples: rows of the batch.
        tokens: tokens of the batch, for a language model.
        flops: FLOPs of the model's forward and backward over all microbatches, without recomputation.
    """

    samples: int | None = None
    tokens: int | None = None
    flops: float | None = None


@frozen
class Throughput:
    """Rates of a step; None for those whose inputs are not known.

    Args:
        samples_per_s, tokens_per_s: over all replicas.
        model_flops_utilisation: model FLOPs ÷ (step × Σ peak FLOP/s of the devices), after PaLM (arXiv 2204.02311,
            appendix B).
    """

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    model_flops_utilisation: float | None = None


def throughput(step_s: float, work: StepTotals, peak_flop_per_s: Sequence[float] | None = None) -> Throughput:
    """The rates of a step.

    Args:
        work: totals of the step.
        peak_flop_per_s: peak rate of every device; None if one is not known.
    """
    if step_s <= 0:
        return Throughput()
    peak = sum(peak_flop_per_s or ())
    return Throughput(
        None if work.samples is None else work.samples / step_s,
        None if work.tokens is None else work.tokens / step_s,
        work.flops / (step_s * peak) if work.flops is not None and peak else None,
    )
