"""The interval of a prediction: what the noise of rehearsed steps implies for the typical step of training.

A step is predicted as the typical one of the rehearsed steps (`core/paired.robust_geometric_mean`), each at the machine
speed that the reference workload showed around it. The error is estimated from these steps, by the bounds of Student's
t on their logarithms, which are useful from five steps on. (Ranks alone, as in `core/paired`, bound five by the
outermost two.) The spread of single steps is not part of it: the typical step varies less.

The noise of the speed readings is in these steps already: each was divided by its own. A later step is compared at the
speed of later readings, of which there are more (``LATER``), and whose noise is at most the present variation of steps
and readings. The two errors are independent, so their squares are added.
"""

import math
import statistics
from collections.abc import Sequence

from attrs import evolve

from ...core.paired import robust_geometric_mean
from ...core.plan.plan import Plan

LATER = 2
"""Number of readings of the reference workload per rehearsed step that a later comparison takes."""
LEVEL = 0.9
"""Probability that the typical step of training lies within the predicted interval."""
FEWEST = 5
"""Number of steps that an interval needs: bounds from four are twice as far apart as from eight."""


def with_interval(plan: Plan, steps_s: Sequence[float], speeds: Sequence[float]) -> Plan:
    """The plan with the interval of its prediction, and the machine's speed meanwhile.

    Args:
        plan: with its prediction.
        steps_s: its rehearsed steps at the speed that the prediction is for, in seconds.
        speeds: seconds of the reference workload around each of them.

    Returns:
        The plan; without an interval for fewer than five steps or readings.
    """
    assert plan.prediction is not None
    reference = robust_geometric_mean(speeds)
    below, above = _reach(steps_s)
    later = min(max(_reach(speeds)), max(below, above)) / math.sqrt(LATER)
    if min(len(steps_s), len(speeds)) < FEWEST:
        return evolve(plan, prediction=evolve(plan.prediction, reference_s=reference))
    predicted_s = plan.prediction.step_s
    low, high = (math.hypot(reach, later) for reach in (below, above))
    interval = predicted_s * math.exp(-low), predicted_s * math.exp(high)
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval, reference_s=reference))


def _reach(values: Sequence[float]) -> tuple[float, float]:
    """How far the typical one of all values may be below and above that of some values, as logarithms.

    Each bound is wrong with half of the probability that ``LEVEL`` leaves; both are infinite for fewer than ``FEWEST``.
    """
    if len(values) < FEWEST:
        return math.inf, math.inf
    from scipy.special import stdtrit  # imported here: it takes a tenth of a second

    logs = [math.log(value) for value in values]
    mean, estimate = statistics.fmean(logs), math.log(robust_geometric_mean(values))
    quantile = float(stdtrit(len(logs) - 1, (1 + LEVEL) / 2))
    reach = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return max(estimate - mean + reach, 0.0), max(mean + reach - estimate, 0.0)
