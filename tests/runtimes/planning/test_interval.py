"""The interval of a prediction from rehearsed steps, and how often it contains the typical step."""

import math
import random
import statistics

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.drift import paired_times
from panpipe.core.paired_difference import robust_geometric_mean
from panpipe.runtimes.planning.interval import BETWEEN_RUNS, PAIRS, TYPICAL, error_of_pairs, with_interval

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=[StageCosts(1, 1, 1)] * 2)
PARTS, PART_S = 8, 0.16
"""Parts of a simulated step, and the seconds of each."""


def correlated(source, count, spread, seconds):
    """Noise whose correlation falls to 1/e in this time."""
    keep = math.exp(-PART_S / seconds) if seconds else 0.0
    noise = [source.gauss(0, spread)]
    while len(noise) < count:
        noise.append(keep * noise[-1] + source.gauss(0, spread * math.sqrt(1 - keep * keep)))
    return noise


def bursts(source, count, spread):
    """Noise with slow moments of a fraction of a second, every 16 s."""
    noise = [source.gauss(0, spread) for _ in range(count)]
    for start in range(count):
        if source.random() < 0.01:
            slower = source.expovariate(1 / 0.3)
            for place in range(start, min(start + source.randrange(1, 6), count)):
                noise[place] += slower
    return noise


def steps_of(noise):
    """The times of steps whose parts have this noise."""
    return [statistics.fmean(map(math.exp, noise[at : at + PARTS])) for at in range(0, len(noise), PARTS)]


def coverage(make, rehearsed, drift=0.0, runs=400):
    """The share of runs whose later steps, in turns with rehearsed ones, are within the interval, and the median
    half-width. ``drift`` is the logarithm of how much slower the machine is by then; runs differ as they do."""
    source, hits, widths = random.Random(rehearsed), 0, list[float]()
    for _ in range(runs):
        times = steps_of(make(source, PARTS * (rehearsed + 8 + 2 * PAIRS)))
        seen, later = times[:rehearsed], [time * math.exp(drift) for time in times[-2 * PAIRS :]]
        then_s, other = robust_geometric_mean(seen), math.exp(source.gauss(0, BETWEEN_RUNS / 2))
        plan = with_interval(PLAN, seen, [1.0] * rehearsed, then_s)
        low, high = (bound / PLAN.prediction.step_s for bound in plan.prediction.interval_s)
        trained = [time * other for time in later[::2]]
        hits += low <= robust_geometric_mean(paired_times(trained, later[1::2], then_s)) / then_s <= high
        widths.append((high - low) / 2)
    return hits / runs, statistics.median(widths)


@pytest.mark.parametrize("drift", [0.0, 0.3, -0.2])
@pytest.mark.parametrize("rehearsed", [1, 2, 3, 8])
@pytest.mark.parametrize(("spread", "seconds"), [(0.06, 0.0), (0.06, 0.3), (0.05, 1.0), (0.05, 3.0), (0.1, 20.0)])
def test_interval_contains_the_typical_later_step(rehearsed, spread, seconds, drift):
    covered, _ = coverage(lambda source, count: correlated(source, count, spread, seconds), rehearsed, drift, 120)
    assert covered >= 0.88


@pytest.mark.parametrize("rehearsed", [2, 3, 8])
def test_interval_of_a_quiet_machine_is_narrow_and_contains_the_typical_later_step(rehearsed):
    for make in (lambda source, count: correlated(source, count, 0.03, 0.3), lambda *given: bursts(*given, 0.02)):
        covered, width = coverage(make, rehearsed)
        assert covered >= 0.9
        assert width <= 0.05


def test_noise_widens_the_interval_and_the_machines_speed_does_not():
    source = random.Random(6)
    quiet, loud = ([math.exp(source.gauss(0, spread)) for _ in range(6)] for spread in (0.01, 0.3))
    assert error_of_pairs(loud) > 3 * error_of_pairs(quiet)
    assert error_of_pairs([3 * time for time in quiet]) == pytest.approx(error_of_pairs(quiet))


def test_one_rehearsed_step_has_the_error_of_typical_noise():
    assert error_of_pairs([1.3]) == error_of_pairs([9.0])
    assert TYPICAL / math.sqrt(PAIRS) < error_of_pairs([1.3]) < 3 * TYPICAL / math.sqrt(PAIRS)


def test_interval_is_around_the_prediction_with_the_readings_of_its_profile():
    found = with_interval(PLAN, [2.0] * 4, [0.02, 0.0202], 2.0).prediction
    low, high = (math.log(bound / PLAN.prediction.step_s) for bound in found.interval_s)
    assert low == pytest.approx(-high)
    assert BETWEEN_RUNS < high < math.hypot(BETWEEN_RUNS, 3 * TYPICAL / math.sqrt(PAIRS))
    assert (found.reference_s, found.rehearsed_s) == (pytest.approx(0.0201, rel=1e-3), 2.0)


def test_plan_without_rehearsed_steps_has_no_interval():
    assert with_interval(PLAN, [], [], None) == PLAN
