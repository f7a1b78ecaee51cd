"""Memory curves and phases of one device, by hand."""

import pytest
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.chart.curve import curves_of, memory_curve
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.schedules.scored import score

from ....support.plans import orders

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=10, freed_by_input_bytes=4)


def row(text):
    return orders(text)[0]


def test_curve_rises_at_the_start_of_forwards_and_falls_at_the_end_of_backwards():
    curve = memory_curve(row("0F0 0F1 0B0 0I1 0W1"), [0, 1, 4, 6, 7], [1, 2, 6, 7, 9], [COST])
    assert curve == [(0, 10), (1, 20), (6, 10), (7, 6), (9, 0)]


def test_curve_has_each_time_once_and_no_change_that_is_none():
    curve = memory_curve(row("0F0 0B0 0F1 0B1"), [1, 2, 3, 4], [2, 3, 4, 5], [COST])
    assert curve == [(0.0, 0.0), (1, 10), (3, 10), (5, 0)]
    times = [time for time, _ in curve]
    assert times == sorted(set(times))
    assert memory_curve((), [], [], [COST]) == [(0.0, 0.0)]


NAMES = sorted(name for name, family in families().items() if name != "building-block")


def scored(name="v-half", devices=4, microbatches=6, limit=None):
    family = find_family(name)
    chunks = family.usual_chunks
    costs = (StageCosts(5.0, 6.0, 4.0, saved_bytes=1, freed_by_input_bytes=0.25),) * (devices * chunks)
    limit = 3.0 if limit is None and name.startswith("zb-") and name[-1] == "p" else limit
    limit = None if limit is None else limit * chunks
    problem = ScheduleProblem(devices, microbatches, chunks, costs, 1.0, limit)
    return score(problem, family.build(problem))


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_has_the_evaluation_s_peak_and_ends_at_zero(name):
    given = scored(name)
    for curve, peak in zip(curves_of(given), given.result.peak_memory, strict=True):
        assert max(held for _, held in curve) == pytest.approx(peak / given.problem.chunks)
        assert curve[-1][1] == pytest.approx(0)
        times = [time for time, _ in curve]
        assert times == sorted(set(times))


def test_memory_curve_equals_one_computed_by_hand():
    # One device: F takes 2 of 2, I frees half of it, W the rest; each takes one unit of time.
    costs = (StageCosts(1.0, 1.0, 1.0, saved_bytes=2, freed_by_input_bytes=1),)
    order = tuple(parse_action(text) for text in ("0F0", "0I0", "0F1", "0W0", "0B1"))
    given = score(ScheduleProblem(1, 2, 1, costs), Schedule("by-hand", (0,), 2, (order,)))
    assert curves_of(given) == [[(0.0, 2.0), (2.0, 3.0), (4.0, 2.0), (6.0, 0.0)]]
