"""Differences of paired measurements: estimates and bounds from ranks."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.paired_difference import difference, robust_geometric_mean


def test_four_pairs_of_one_sign_show_a_difference_and_three_do_not():
    assert difference([0.01, 0.03, 0.02, 0.05], 0.1).low == 0.01
    three = difference([0.01, 0.03, 0.02], 0.1)
    assert (three.low, three.high) == (-math.inf, math.inf)


def test_estimate_is_the_median_of_the_means_of_all_pairs_of_differences():
    assert difference([1.0, 2.0, 6.0], 0.1).estimate == 2.75  # of 1, 1.5, 2, 3.5, 4, 6


def test_one_outlier_of_six_pairs_does_not_hide_a_difference():
    assert difference([0.04, 0.05, 0.05, 0.06, 0.05, -0.3], 0.1).low > -0.15
    assert difference([0.04, 0.05, 0.05, 0.06, 0.05, -0.001], 0.1).low > 0


@pytest.mark.parametrize("count", [4, 5, 8, 12])
def test_bounds_have_the_requested_error_for_any_noise(count):
    source = random.Random(count)
    draws = (lambda: source.gauss(0, 1), lambda: source.choice((-1, 1)) * source.expovariate(1) ** 2)
    for draw in draws:
        missed = sum(difference([draw() for _ in range(count)], 0.1).low > 0 for _ in range(2000))
        assert missed <= 0.12 * 2000


def test_bounds_narrow_with_more_pairs():
    source = random.Random(0)
    values = [source.gauss(0.02, 0.01) for _ in range(16)]
    found = [difference(values[:n], 0.1) for n in (4, 8, 16)]
    widths = [each.high - each.low for each in found]
    assert widths == sorted(widths, reverse=True)


def test_robust_geometric_mean_of_a_power_law_and_with_an_outlier():
    assert robust_geometric_mean([3.0]) == pytest.approx(3.0)
    assert robust_geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert robust_geometric_mean([1.0, 2.0, 4.0, 8.0, 16.0]) == pytest.approx(4.0)
    # The Walsh averages of 0, 0, 0, 0, log 100: ten of 0, four of log 10, one of log 100.
    assert robust_geometric_mean([1.0, 1.0, 1.0, 1.0, 100.0]) == pytest.approx(1.0)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12), st.floats(0.1, 10.0))
def test_robust_geometric_mean_scales_with_its_values(values, factor):
    scaled = robust_geometric_mean([factor * value for value in values])
    assert scaled == pytest.approx(factor * robust_geometric_mean(values))
