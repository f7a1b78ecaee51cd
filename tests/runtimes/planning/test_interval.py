"""The interval of a prediction from rehearsed steps, and how often it contains the typical step."""

import math
import random
import statistics

import pytest
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.paired import robust_geometric_mean
from panpipe.core.trace.trace import Trace, TraceEvent
from panpipe.runtimes.planning.interval import BETWEEN, FEWEST, PARTS, TYPICAL, error_of_mean, noise_of, with_interval

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=[StageCosts(1, 1, 1)] * 2)
PART_S = 0.16
"""Seconds of a part of the steps that are simulated."""


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


def typical(noise):
    """The typical step of parts with this noise."""
    steps = [noise[at : at + PARTS] for at in range(0, len(noise), PARTS)]
    return robust_geometric_mean([statistics.fmean(map(math.exp, step)) for step in steps])


def coverage(make, steps, runs=300):
    """The share of runs whose later steps are within the interval of rehearsed ones, and the median half-width."""
    source, hits, widths = random.Random(steps), 0, list[float]()
    for _ in range(runs):
        noise = make(source, PARTS * (steps + 8 + 16))
        seen, later = noise[: PARTS * steps], noise[-PARTS * 16 :]
        reach = math.log(with_interval(PLAN, seen, []).prediction.interval_s[1] / PLAN.prediction.step_s)
        hits += abs(math.log(typical(seen) / typical(later))) <= reach
        widths.append(reach)
    return hits / runs, statistics.median(widths)


@pytest.mark.parametrize(
    ("steps", "spread", "seconds"),
    [*((n, *noise) for n in (2, 3, 8) for noise in ((0.06, 0.0), (0.06, 0.3), (0.05, 0.6), (0.04, 1.0))),
     (3, 0.025, 3.0), (8, 0.025, 3.0)],
)  # fmt: skip
def test_interval_contains_the_typical_later_step_under_correlated_noise(steps, spread, seconds):
    covered, _ = coverage(lambda source, count: correlated(source, count, spread, seconds), steps)
    assert covered >= 0.88


@pytest.mark.parametrize("steps", [3, 5, 8])
def test_interval_of_a_quiet_machine_is_narrow_and_contains_the_typical_later_step(steps):
    for make in (lambda source, count: correlated(source, count, 0.03, 0.3), lambda *given: bursts(*given, 0.02)):
        covered, width = coverage(make, steps)
        assert covered >= 0.9
        assert width <= 0.05


def test_correlated_noise_is_worth_fewer_samples():
    source = random.Random(5)
    white, slow = (
        statistics.median(error_of_mean(correlated(source, 40, 0.05, seconds)) for _ in range(40)) for seconds in (0, 1)
    )
    assert slow > 1.5 * white


def test_interval_is_around_the_prediction_and_grows_with_the_noise():
    source = random.Random(6)
    quiet, loud = (
        with_interval(PLAN, [source.gauss(0, spread) for _ in range(24)], [0.02, 0.0202]).prediction
        for spread in (0.01, 0.3)
    )
    assert loud.interval_s[0] < quiet.interval_s[0] < PLAN.prediction.step_s < quiet.interval_s[1] < loud.interval_s[1]
    assert quiet.reference_s == pytest.approx(0.0201, rel=1e-3)


def test_equal_steps_leave_the_difference_between_runs_and_a_share_of_the_typical_error():
    low, high = with_interval(PLAN, [0.0] * 24, [0.02]).prediction.interval_s
    reach = math.log(high / PLAN.prediction.step_s)
    assert math.log(low / PLAN.prediction.step_s) == pytest.approx(-reach)
    assert BETWEEN < reach < math.hypot(BETWEEN, TYPICAL)


def test_one_rehearsed_step_has_the_bounds_of_typical_noise_and_not_of_its_own_slow_moments():
    source = random.Random(7)
    for spread in (0.02, 0.3):
        noise = correlated(source, PARTS, spread, 1.0)
        low, high = with_interval(PLAN, noise, [0.02]).prediction.interval_s
        assert 0.05 < math.log(high / low) / 2 < 0.5
    covered, width = coverage(lambda source, count: correlated(source, count, 0.04, 0.3), 1)
    assert covered >= 0.9
    assert width <= 0.12


def test_too_little_noise_has_no_interval():
    found = with_interval(PLAN, [0.1, 0.2] * (FEWEST // 2), [0.01]).prediction
    assert (found.interval_s, found.reference_s) == (None, pytest.approx(0.01))
    assert with_interval(PLAN, [], []).prediction.reference_s is None


def step_of(*times):
    """A trace of F of one stage, one after another, with these durations in seconds."""
    at, events = 0.0, []
    for number, seconds in enumerate(times):
        events.append(TraceEvent(0, "compute", parse_action(f"0F{number}"), at, at + seconds))
        at += seconds
    return Trace("measured", "", 1, tuple(events), (), at)


def test_noise_of_parts_is_relative_to_what_the_programs_typically_take():
    noise = noise_of([step_of(*[1.0] * PARTS), step_of(*[1.0] * PARTS), step_of(*[2.0] * PARTS)])
    assert noise == pytest.approx([0.0] * 2 * PARTS + [math.log(2)] * PARTS)


def test_parts_in_which_no_program_ran_are_left_out():
    assert noise_of([step_of(1.0), step_of(1.0), Trace("measured", "", 1, (), (), 1.0)]) == [0.0, 0.0]
