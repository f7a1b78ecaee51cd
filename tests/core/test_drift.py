"""Steps without the machine's drift: readings correct where they explain the steps, and do not where they are noise."""

import math
import random
import statistics

import pytest
from panpipe.core.drift import shrunk_drift, steady_times
from panpipe.core.paired_difference import robust_geometric_mean


def spread(times):
    return statistics.stdev(map(math.log, times))


def series(source, count, speed=0.0, step=0.02, reading=0.02, common=0.0):
    """Times of steps and of readings around them, on a machine slower by ``speed``, a logarithm."""
    slow = [speed + source.gauss(0, common) for _ in range(count)]
    return [[math.exp(each + source.gauss(0, noise)) for each in slow] for noise in (step, reading)]


def test_readings_that_explain_the_steps_correct_each():
    times, readings = series(random.Random(1), 20, common=0.2)
    assert spread(steady_times(times, readings)) < 0.3 * spread(times)


def test_readings_without_a_relation_to_the_steps_add_no_noise():
    source = random.Random(2)
    times, readings = series(source, 20, step=0.02)[0], series(source, 20, reading=0.2)[1]
    assert steady_times(times, readings) == times


@pytest.mark.parametrize("slower", [-0.4, 0.2, 0.7])
def test_large_drift_is_corrected_whole(slower):
    times, readings = series(random.Random(3), 12, speed=slower)
    assert shrunk_drift(readings, 1.0) == pytest.approx(slower, abs=0.03)
    assert robust_geometric_mean(steady_times(times, readings, 1.0)) == pytest.approx(1.0, abs=0.03)


def test_drift_within_the_noise_of_readings_counts_as_none():
    source = random.Random(4)
    found = [shrunk_drift(series(source, 8, reading=0.15)[1], math.exp(source.gauss(0, 0.05))) for _ in range(400)]
    plain = [math.log(robust_geometric_mean(series(source, 8, reading=0.15)[1])) for _ in range(400)]
    assert statistics.median(map(abs, found)) < 0.3 * statistics.median(map(abs, plain))


def test_one_reading_corrects_by_itself():
    assert steady_times([2.0], [0.02], 0.01) == pytest.approx([1.0])
    assert shrunk_drift([0.01], 0.01) == pytest.approx(0.0)
