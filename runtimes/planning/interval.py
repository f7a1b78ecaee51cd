"""The interval of a prediction: what the noise of rehearsed steps implies for the typical step of training.

A step is predicted as the typical one of a few rehearsed steps. The rule for its 90 % interval:

1. Each rehearsed step is cut into ``PARTS`` parts of equal length. The noise of a part is the logarithm of the time
   that its programs took ÷ the time that the same programs typically take (``noise_of``). These parts follow each
   other, and they explain the steps: of 13 steps of a GPT-2 on two cores their means correlated with the step by 0.99.
2. Slow moments last longer than a part, so parts are no independent samples: n of them are worth n·(1 − r)/(1 + r), for
   the correlation r of neighbours, corrected for its bias in short series (Kendall 1954) and at most ``MOST``.
   (A median's error that took them for independent would be too small by a factor of 2 to 3.)
3. One or two steps say little about their own noise: alone, they imply bounds of up to 80 %. So the variance of their
   mean is pooled with that of a typical one, ``TYPICAL``, which counts as ``TYPICAL_DEGREES`` samples. The error has
   the quantile of Student's t for all of them. A later mean has an error, too: of ``LATER`` times as many steps.
4. Runs differ by ``BETWEEN`` in addition, in ways that no single run shows: where memory lies, and slow changes of the
   machine that the reference workload does not notice.

These errors are independent, so their squares are added. Coverage is tested with noise that is white, correlated over a
second, or in bursts.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve

from ...core.actions import WORK_KINDS
from ...core.paired import robust_geometric_mean
from ...core.plan.plan import Plan
from ...core.trace.trace import Trace

LATER = 4
"""Number of steps per rehearsed step that a later comparison takes."""
LEVEL = 0.9
"""Probability that the typical step of training lies within the predicted interval."""
PARTS = 8
"""Parts of a step."""
FEWEST = 5
"""Number of parts or steps that an interval needs."""
MOST = 0.9
"""Largest correlation of neighbours: without a limit a series of twenty parts in one slow moment has no bounds."""
TYPICAL, TYPICAL_DEGREES = 0.035, 1.5
"""Typical error of the mean of a few rehearsed steps, and its degrees of freedom. Corrected errors of the demo's step
after one to three rehearsed ones were 2.0, 3.4, 5.9, 9.0 and 10.0 % on two shared cores, with drift."""
BETWEEN = 0.03
"""Of five runs of the demo, typical later steps were 0.5, 1.1, 1.8, 4.3 and 4.3 % off; for one of the last two, eight
rehearsed steps alone implied 2.0 %."""


def with_interval(plan: Plan, noise: Sequence[float], readings_s: Sequence[float]) -> Plan:
    """The plan with the interval of its prediction, and the machine's speed meanwhile.

    Args:
        plan: with its prediction.
        noise: of its rehearsed steps, as logarithms, in the order of time (see `noise_of`).
        readings_s: of the reference workload around each step.

    Returns:
        The plan; without an interval for too little noise, and without a reading for none.
    """
    assert plan.prediction is not None
    reference = robust_geometric_mean(readings_s) if readings_s else None
    interval = None
    if len(noise) >= FEWEST:
        reach = math.hypot(error_of_mean(noise) * math.sqrt(1 + 1 / LATER), BETWEEN)
        predicted_s = plan.prediction.step_s
        interval = predicted_s * math.exp(-reach), predicted_s * math.exp(reach)
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval, reference_s=reference))


def error_of_mean(noise: Sequence[float]) -> float:
    """How far the mean of a correlated series may be from that of a long one: with probability ``LEVEL`` at most this.

    Args:
        noise: at least two values, in the order of time.
    """
    from scipy.special import stdtrit  # imported here: it takes a tenth of a second

    count, mean = len(noise), statistics.fmean(noise)
    off = [value - mean for value in noise]
    squares = math.fsum(value * value for value in off)
    lagged = math.fsum(a * b for a, b in pairwise(off)) / squares if squares else 0.0
    correlation = min(max(lagged + (1 + 3 * lagged) / count, 0.0), MOST)
    worth = count * (1 - correlation) / (1 + correlation)
    own = max(worth - 1, 0.0)
    degrees = own + TYPICAL_DEGREES
    variance = (own * squares / (count - 1) / worth + TYPICAL_DEGREES * TYPICAL**2) / degrees
    return float(stdtrit(degrees, (1 + LEVEL) / 2)) * math.sqrt(variance)


def noise_of(traces: Sequence[Trace]) -> list[float]:
    """The noise of each part of each step: the logarithm of how much longer its programs took than they typically do.

    Args:
        traces: of steps of one plan, in the order of time. Parts in which no program ran are left out.
    """
    steps = [[event for event in trace.events if event.action.kind in WORK_KINDS] for trace in traces]
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for event in (event for step in steps for event in step):
        times[event.device, event.action.stage, event.action.kind].append(event.end_s - event.start_s)
    typical = {program: statistics.median(each) for program, each in times.items()}
    noise = []
    for step in steps:
        first, last = min((e.start_s for e in step), default=0.0), max((e.end_s for e in step), default=0.0)
        took, usual = [0.0] * PARTS, [0.0] * PARTS
        for event in step:
            middle = (event.start_s + event.end_s) / 2 - first
            part = min(int(PARTS * middle / (last - first)), PARTS - 1) if last > first else 0
            took[part] += event.end_s - event.start_s
            usual[part] += typical[event.device, event.action.stage, event.action.kind]
        noise += [math.log(a / b) for a, b in zip(took, usual, strict=True) if a > 0 and b > 0]
    return noise
