"""The interval of a prediction: what the noise of rehearsed steps implies for the typical step of training.

The speed of a shared machine changes, so a measured step is compared at the speed of the profile: each measured step is
paired with a rehearsed step of the same plan next to it (``Pipeline.rehearsed_s``, `core/drift.paired_times`). What the
machine's speed does to both cancels, and so does the error of the rehearsed steps that the prediction is computed from:
the prediction and `Prediction.rehearsed_s` have the same one. What is left, and the rule for its 90 % interval:

1. The noise of a pair: the logarithm of the ratio of two steps that follow each other. Its variance is measured by the
   ratios of neighbours among the rehearsed steps; its mean is 0, because the steps are the same.
2. k rehearsed steps have k − 1 such ratios, which share steps: they are worth 2/3 as many independent ones. So few
   ratios are a poor estimate of the noise, so they are pooled with a typical one, ``TYPICAL``, which counts as
   ``TYPICAL_DEGREES`` ratios. The error has the quantile of Student's t for all of them.
3. The typical step is compared over at least ``PAIRS`` pairs.
4. Runs differ by ``BETWEEN_RUNS`` in addition: a step of training has an optimizer step and its state, a rehearsed one
   does not.

These errors are independent, so their squares are added. Coverage is tested with noise that is white, correlated over
seconds, or in bursts, on a machine that becomes slower or faster.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve

from ...core.paired_difference import robust_geometric_mean
from ...core.plan.plan import Plan

PAIRS = 8
"""Least number of pairs of a measured and a rehearsed step that a measurement is compared by."""
LEVEL = 0.9
"""Probability that the typical step of training lies within the predicted interval."""
TYPICAL, TYPICAL_DEGREES = 0.04, 3.0
"""Typical noise of a pair, and its degrees of freedom: of 12 steps of a GPT-2 on two quiet cores each varied by 2.7 %,
so that the ratio of two varies by 3.8 %."""
BETWEEN_RUNS = 0.025
"""Of six models by 1F1B, each over 12 pairs (`benchmarks/results/prediction.md`), the corrected errors of predictions
were 2.6 % in the median; pairs of this many explain 1.1 %, and cuts of two orders a part of the rest."""


def with_interval(plan: Plan, steps_s: Sequence[float], readings_s: Sequence[float], rehearsed_s: float | None) -> Plan:
    """The plan with the interval of its prediction, and the machine's speed meanwhile.

    Args:
        plan: with its prediction.
        steps_s: of its rehearsed steps, in the order of time, without an optimizer step.
        readings_s: of the reference workload around each of them.
        rehearsed_s: the typical one of these steps, from which the step is predicted; None if it cannot be measured
            again.

    Returns:
        The plan; without any of these for no rehearsed steps.
    """
    assert plan.prediction is not None
    if not steps_s:
        return plan
    reach, predicted_s = math.hypot(error_of_pairs(steps_s), BETWEEN_RUNS), plan.prediction.step_s
    return evolve(
        plan,
        prediction=evolve(
            plan.prediction,
            interval_s=(predicted_s * math.exp(-reach), predicted_s * math.exp(reach)),
            reference_s=robust_geometric_mean(readings_s),
            rehearsed_s=rehearsed_s,
        ),
    )


def error_of_pairs(steps_s: Sequence[float]) -> float:
    """How far the mean logarithm of ``PAIRS`` ratios of neighbours may be from 0: with probability ``LEVEL`` at most
    this.

    Args:
        steps_s: rehearsed steps, in the order of time.
    """
    from scipy.special import stdtrit  # imported here: it takes a tenth of a second

    ratios = [math.log(after / before) for before, after in pairwise(steps_s)]
    own = len(ratios) * 2 / 3
    degrees = own + TYPICAL_DEGREES
    mean_square = math.fsum(ratio * ratio for ratio in ratios) / len(ratios) if ratios else 0.0
    variance = (own * mean_square + TYPICAL_DEGREES * TYPICAL**2) / degrees
    return float(stdtrit(degrees, (1 + LEVEL) / 2)) * math.sqrt(variance / PAIRS)
