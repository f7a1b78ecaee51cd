"""The interval of a prediction from rehearsed steps, and how often it contains the typical step."""

import math
import random
import statistics

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.paired import robust_geometric_mean
from panpipe.runtimes.planning.interval import LATER, LEVEL, with_interval
from scipy import stats

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=[StageCosts(1, 1, 1)] * 2)
STEADY = [0.02] * 6
"""Readings of the reference workload on a machine whose speed does not change."""


@pytest.mark.parametrize("steps", [5, 6, 8, 12])
def test_interval_contains_the_typical_step_with_its_probability(steps):
    plan, hits, widths = PLAN, 0, list[float]()
    source, predicted = random.Random(1), plan.prediction.step_s
    for _ in range(400):
        seen = [math.exp(source.gauss(0, 0.03)) for _ in range(steps)]
        found = with_interval(plan, seen, STEADY).prediction
        low, high = (bound / predicted * robust_geometric_mean(seen) for bound in found.interval_s)
        hits += low <= 1.0 <= high
        widths.append((found.interval_s[1] - found.interval_s[0]) / (2 * predicted))
    assert hits / 400 >= 0.88
    assert statistics.median(widths) < 2 * 0.03 / math.sqrt(steps) * 1.5


def test_interval_is_around_the_prediction_and_grows_with_the_noise():
    plan = PLAN
    seen = [1.0, 1.01, 0.99, 1.0, 1.005, 0.995]
    quiet = with_interval(plan, seen, [0.02, 0.0202, 0.0201, 0.0201, 0.0201]).prediction
    loud = with_interval(plan, [1.0, 1.3, 0.8, 1.0, 1.1, 0.9], STEADY).prediction
    assert quiet.interval_s[0] < plan.prediction.step_s < quiet.interval_s[1]
    assert loud.interval_s[0] < quiet.interval_s[0] < quiet.interval_s[1] < loud.interval_s[1]
    drifting = with_interval(plan, seen, [0.02, 0.024, 0.022, 0.019, 0.021]).prediction
    assert drifting.interval_s[0] < quiet.interval_s[0]
    assert quiet.reference_s == pytest.approx(0.0201, rel=1e-3)


@pytest.mark.parametrize("steps", [5, 6, 16, 40])
def test_interval_of_steady_readings_has_the_quantile_of_students_t(steps):
    plan, source = PLAN, random.Random(3)
    seen = [math.exp(source.gauss(0, 0.03)) for _ in range(steps)]
    logs = [math.log(time) for time in seen]
    found = with_interval(plan, seen, STEADY).prediction
    reach = stats.t.ppf((1 + LEVEL) / 2, steps - 1) * stats.sem(logs)
    shift = math.log(robust_geometric_mean(seen)) - statistics.fmean(logs)
    ratios = [math.log(bound / plan.prediction.step_s) for bound in found.interval_s]
    assert ratios == pytest.approx([-shift - reach, reach - shift])


def test_interval_counts_the_noise_of_readings_once():
    plan = PLAN
    seen, drift = [1.0, 1.01, 1 / 1.01, 1.0, 1.005, 1 / 1.005], [0.02, 0.03, 0.02, 0.04, 0.02, 0.03]
    alone, drifting = (with_interval(plan, seen, speeds).prediction.interval_s for speeds in (STEADY, drift))
    reach = [math.log(high / plan.prediction.step_s) for _, high in (alone, drifting)]
    assert reach[0] < reach[1] <= reach[0] * math.sqrt(1 + 1 / LATER) * 1.001


def test_one_outlier_of_six_steps_does_not_bound_the_interval():
    plan = PLAN
    found = with_interval(plan, [1.0, 1.01, 0.99, 1.0, 1.005, 3.0], STEADY).prediction
    assert found.interval_s[1] < 2 * plan.prediction.step_s


@pytest.mark.parametrize(("steps", "speeds"), [(1, 6), (4, 6), (6, 4), (6, 1)])
def test_too_few_steps_or_readings_have_no_interval(steps, speeds):
    found = with_interval(PLAN, [1.0] * steps, [0.01] * speeds).prediction
    assert (found.interval_s, found.reference_s) == (None, pytest.approx(0.01))
