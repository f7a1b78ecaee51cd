"""Step times without the drift of the machine's speed, which readings of a reference workload measure.

A reading lasts a tenth of a step and is noisy itself. On a busy machine a step and the readings around it vary
together, and dividing one by the other halves the noise. On a quiet one they do not: of 12 steps of a GPT-2 on two
cores, the steps varied by 2.7 % and readings of memory traffic by 13 %, without a correlation; dividing would add their
noise. So the data decide twice:

- within a series, each step is divided by its own reading if that makes the steps vary less;
- the drift between two series is shrunk by the share of its square that the readings' noise explains (the positive-part
  estimate of James and Stein): a drift within the noise counts as none, and a large one counts whole.

The rehearsed step of a plan (`Pipeline.rehearsed_s`) is another kind of reading: it has the arithmetic and the memory
traffic of the measured step, and takes as long. Its noise is that of a step, so that the ratio of a step and its
neighbour varies at most by √2 more than the step alone, and by less where the machine is slow for both:
`paired_times` divides each step by its own reading. A workload that stays in caches misses what slows down memory: over
30 predictions on a machine whose speed changed by −13 to +25 %, errors were 2.3 % in the median after the first
correction, and 4.6 % after the other (`benchmarks/results/prediction.md`).
"""

import math
import statistics
from collections.abc import Sequence

from .paired_difference import robust_geometric_mean


def steady_times(
    times_s: Sequence[float], readings_s: Sequence[float], reference_s: float | None = None
) -> list[float]:
    """Times of steps at another speed of the machine.

    Args:
        times_s: of steps that follow each other.
        readings_s: of the reference workload around each of them.
        reference_s: its reading at the other speed; by default the typical one of ``readings_s``.

    Returns:
        For each step its time at that speed, in seconds.
    """
    typical = robust_geometric_mean(readings_s)
    each = [time * typical / reading for time, reading in zip(times_s, readings_s, strict=True)]
    steady = each if _variance(each) < _variance(times_s) else list(times_s)
    if reference_s is None:
        return steady
    factor = math.exp(-shrunk_drift(readings_s, reference_s))
    return [time * factor for time in steady]


def paired_times(times_s: Sequence[float], readings_s: Sequence[float], reading_s: float) -> list[float]:
    """Times of steps at another speed of the machine, by a reading next to each that is as long and of the same kind.

    Args:
        times_s: of steps.
        readings_s: of the rehearsed step next to each of them.
        reading_s: the typical reading at the other speed.

    Returns:
        For each step its time at that speed, in seconds.
    """
    return [time * reading_s / reading for time, reading in zip(times_s, readings_s, strict=True)]


def shrunk_drift(readings_s: Sequence[float], reference_s: float) -> float:
    """The logarithm of how much slower the machine has become, as far as the noise of the readings does not explain it.

    Args:
        readings_s: the present ones; at least one.
        reference_s: the typical one of as many earlier ones, which were as noisy.
    """
    drift = math.log(robust_geometric_mean(readings_s) / reference_s)
    noise = 2 * _variance(readings_s) / len(readings_s)
    return drift * max(1 - noise / drift**2, 0.0) if drift else 0.0


def _variance(values: Sequence[float]) -> float:
    """Of the logarithms; 0 for one value."""
    return statistics.variance(map(math.log, values)) if len(values) > 1 else 0.0
