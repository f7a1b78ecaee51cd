"""Lines of latency and rate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.links.lines import fit_line
from panpipe.core.errors import RequestError
from scipy.optimize import nnls

SIZES = [64, 4096, 1 << 16, 1 << 20, 1 << 22]


@settings(deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_fit_recovers_a_line(latency_s, rate):
    fit = fit_line(SIZES, [latency_s + size / rate for size in SIZES])
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-4)
    assert [point.fitted_s for point in fit.points] == pytest.approx([point.measured_s for point in fit.points])
    assert fit.seconds(1 << 18) == pytest.approx(latency_s + (1 << 18) / rate, rel=1e-4)


def test_residuals_are_distances_from_the_line():
    fit = fit_line([1, 1, 1001, 1001], [1.0, 1.0, 2.0, 3.0])
    assert fit.latency_s == pytest.approx(1.0, rel=1e-2)
    assert 2.2 < fit.seconds(1001) < 2.6
    assert [point.error for point in fit.points] == pytest.approx([0, 0, 0.2, 0.2], abs=0.06)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-6, 1e-1), min_size=len(SIZES), max_size=len(SIZES)))
def test_fit_has_the_least_relative_error_of_all_lines_without_negative_parts(seconds):
    fit = fit_line(SIZES, seconds)
    times = np.array(seconds)
    rows = np.stack([1 / times, np.array(SIZES) / SIZES[-1] / times], axis=1)
    _, least = nnls(rows, np.ones(len(SIZES)))
    found = [fit.latency_s, 0.0 if fit.points[0].fitted_s == fit.points[-1].fitted_s else SIZES[-1] / fit.bytes_per_s]
    assert np.linalg.norm(rows @ np.array(found) - 1) <= least * (1 + 1e-6) + 1e-9


def test_neither_latency_nor_time_per_byte_is_below_0():
    assert fit_line([1, 2], [1.0, 3.0]).latency_s == 0
    assert fit_line([100, 200], [2.0, 1.0]).bytes_per_s == 200  # the rate that was reached


@pytest.mark.parametrize(("sizes", "seconds"), [([1], [1.0]), ([1, 1], [1.0, 2.0]), ([1, 2], [0.0, 1.0]), ([], [])])
def test_samples_without_a_line_are_refused(sizes, seconds):
    with pytest.raises(RequestError, match="a line needs two sizes and times above 0"):
        fit_line(sizes, seconds)
