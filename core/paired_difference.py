"""The difference of two candidates from paired measurements: an estimate and its confidence bounds, from ranks alone.

Two candidates that take turns are measured in pairs, so that a drift of the machine's speed affects both equally. The
distribution of the noise is unknown and has outliers, so none is assumed: the estimate is the Hodges–Lehmann estimate,
the median of all means of two differences (Walsh averages), and the bounds are those of Wilcoxon's signed-rank test
(Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3rd ed., sections 3.2 and 3.3).
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache

from attrs import frozen


@frozen
class Difference:
    """An estimated difference.

    Args:
        estimate: in the unit of the measurements.
        low, high: one-sided confidence bounds; infinite if there are too few pairs.
        pairs: number of pairs.
    """

    estimate: float
    low: float
    high: float
    pairs: int


def difference(values: Sequence[float], error: float) -> Difference:
    """Estimate and bounds of a difference.

    Args:
        values: the differences of the pairs; at least one.
        error: largest probability that the true difference is below ``low``, and, separately, that it is above
            ``high``. Four pairs allow 1/16, five 1/32.
    """
    averages = _walsh_averages(values)
    place = _place(len(values), error)
    if place is None:
        return Difference(statistics.median(averages), -math.inf, math.inf, len(values))
    return Difference(statistics.median(averages), averages[place], averages[-1 - place], len(values))


def robust_geometric_mean(values: Sequence[float]) -> float:
    """The typical one of positive values: the Hodges–Lehmann estimate of their logarithms.

    Of 200 steps of a ViT on two shared cores, each divided by the reference readings around it, the estimates from any
    8 in a row varied by 5.7 %, their medians by 7.0 %; of 300 steps of a ResNet by 7.7 and 8.0 %. The steps themselves
    varied by 18 and 21 %.

    Args:
        values: at least one.
    """
    return math.exp(statistics.median(_walsh_averages([math.log(value) for value in values])))


def _walsh_averages(values: Sequence[float]) -> list[float]:
    """The means of all pairs of values, each value with itself too, ascending. Their median is the estimate."""
    return sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])


@cache
def _place(count: int, error: float) -> int | None:
    """Number of Walsh averages outside the bounds on each side; None if no average is a bound for this error.

    ``ways[k]`` of the ``2 ** count`` choices of signs give a sum of k for the ranks of the positive differences.
    """
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    place, passed = None, 0
    for total, number in enumerate(ways):
        passed += number
        if passed > error * 2**count:
            break
        place = total
    return place
