"""Every placement of a small graph: which are enumerated, and that the walks on them are sound."""

import pytest
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.annealing.every_placement import few_placements, on_every_placement
from panpipe.core.search.annealing.free_placement import refined
from panpipe.core.search.annealing.packing import packed
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.meter import Meter

from ....support.settings import setting_of


def walks_of(forward_s, budget=20_000, **options):
    """A packed walk's step, the walks on all placements, and the meter."""
    setting = setting_of(forward_s, backward=True, **options)
    first = [refined(walk) for walk in packed(setting)]
    for walk in first:
        walk.annealed = False
        walk.evaluate()
    step_s, meter = min(walk.step_s for walk in first), Meter(budget)
    return step_s, on_every_placement(first, meter, 0), meter


@pytest.mark.parametrize("memory", [1000.0, 40.0])
def test_walks_on_every_placement_are_sound_and_use_every_device(memory):
    step_s, walks, meter = walks_of([3.0, 1.0, 1.0, 2.0, 2.0, 5.0, 1.0], saved=10, memory=memory)
    assert min(walk.step_s for walk in walks) < step_s
    assert meter.spent <= meter.budget
    for walk in walks:
        assert walk.excess == 0
        assert walk.annealed or walk.step_s >= step_s  # the name tells that the order is another one
        assert set(walk.best.placement.tolist()) == {0, 1}
        validate(draft(walk)[0])


def test_placements_are_enumerated_for_small_graphs_alone():
    assert few_placements(setting_of([1.0] * 9, backward=True, devices=3))
    assert not few_placements(setting_of([1.0] * 16, backward=True, devices=2))


def test_equal_devices_are_exchanged_for_each_other_once():
    # Three operators on two devices: 2³ − 2 placements use both; with the first on device 0 half of them are left.
    _, walks, _ = walks_of([1.0] * 3, saved=0)
    placements = {tuple(walk.best.placement.tolist()) for walk in walks}
    assert placements <= {(0, 0, 1), (0, 1, 0), (0, 1, 1)}


def test_search_ends_where_no_placement_can_be_faster():
    # One operator has nearly all of the work: wherever the others are, its device takes 4 · 30 s.
    step_s, walks, meter = walks_of([10.0, 0.01, 0.01])
    assert step_s >= min(walk.step_s for walk in walks) >= 120
    assert meter.spent < meter.budget
