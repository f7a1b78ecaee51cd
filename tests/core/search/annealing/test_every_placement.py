"""Starts on every placement of a small graph: which are enumerated, and that they are sound."""

import pytest
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.annealing.every_placement import few_placements, on_every_placement
from panpipe.core.search.annealing.free_placement import refined
from panpipe.core.search.annealing.packing import packed
from panpipe.core.search.finalize import draft

from ....support.settings import setting_of


@pytest.mark.parametrize("memory", [1000.0, 40.0])
def test_starts_on_every_placement_are_sound_and_use_every_device(memory):
    setting = setting_of([3.0, 1.0, 1.0, 2.0, 2.0, 5.0, 1.0], backward=True, saved=10, memory=memory, devices=2)
    (first, *_) = (refined(walk) for walk in packed(setting))
    first.evaluate()
    walks = list(on_every_placement(first))
    assert walks
    assert len({walk.best.placement.tobytes() for walk in walks}) == len(walks)
    for walk in walks:
        walk.evaluate()
        assert walk.excess == 0
        assert set(walk.best.placement.tolist()) == {0, 1}
        validate(draft(walk)[0])


def test_placements_are_enumerated_for_small_graphs_alone():
    assert few_placements(setting_of([1.0] * 9, backward=True, devices=3))
    assert not few_placements(setting_of([1.0] * 16, backward=True, devices=2))


def walks_of(forward_s, **options):
    setting = setting_of(forward_s, backward=True, **options)
    (first, *_) = (refined(walk) for walk in packed(setting))
    first.evaluate()
    return first, list(on_every_placement(first))


def test_equal_devices_are_exchanged_for_each_other_once():
    # Three operators on two devices: 2³ − 2 placements use both; with the first on device 0 half of them are left.
    _, walks = walks_of([1.0] * 3, saved=0)
    placements = {tuple(walk.best.placement.tolist()) for walk in walks}
    assert all(placement[0] == 0 for placement in placements)
    assert placements <= {(0, 0, 1), (0, 1, 0), (0, 1, 1)}


def test_placements_that_cannot_be_faster_are_left_out():
    # One operator has nearly all of the work: wherever the others are, its device takes 4 · 30 s.
    first, walks = walks_of([10.0, 0.01, 0.01])
    assert first.step_s >= 120
    for walk in walks:
        walk.evaluate()
        assert walk.step_s >= 120


def test_order_of_a_start_runs_what_can_start_first():
    _, walks = walks_of([1.0] * 4, microbatches=2)
    for walk in walks:
        plan, _ = draft(walk)
        starts = [str(row[0]) for row in plan.device_actions]
        assert "0F0" in starts
        walk.evaluate()
        assert walk.step_s <= 2 * 4 * 3  # no slower than one microbatch after another
