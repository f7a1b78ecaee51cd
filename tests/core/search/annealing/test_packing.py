"""Operators packed so that one microbatch at a time fits: which devices, which orders, and when there are none."""

import numpy as np
import pytest
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.annealing.free_placement import one_by_one, packed
from panpipe.core.search.finalize import draft

from ....support.settings import setting_of


def test_packing_fits_whatever_fits_one_microbatch_at_a_time():
    # 70 bytes of saved tensors on two devices: 40 each are needed, 35 are not enough for seven operators of 10.
    assert not list(packed(setting_of([1.0] * 7, backward=True, saved=10, memory=35.0)))
    for walk in packed(setting_of([1.0] * 7, backward=True, saved=10, memory=40.0)):
        walk.evaluate()
        assert walk.excess == 0
        assert walk.step_s > 0


def rows_of(walk):
    plan, _ = draft(walk)
    return [" ".join(map(str, row)) for row in plan.device_actions]


def test_microbatches_run_one_after_another():
    walk = one_by_one(setting_of([1.0] * 4, microbatches=2), np.array([0, 0, 1, 1]), np.array([2]))
    assert rows_of(walk) == ["0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    walk.evaluate()
    assert walk.step_s == 2 * 4  # I and W take no time here


def test_stages_begin_at_the_inner_cuts():
    walk = one_by_one(setting_of([1.0] * 4, microbatches=1), np.array([0, 1, 1, 0]), np.array([1, 3]))
    assert walk.best.placement.tolist() == [0, 1, 0]
    assert walk.best.cuts.tolist() == [0, 1, 3, 4]
    assert rows_of(walk)[0] == "0F0 2F0 2I0 2W0 0I0 0W0"


@pytest.mark.parametrize("devices", [2, 3])
def test_every_device_gets_an_operator_and_placements_differ(devices):
    walks = list(packed(setting_of([3.0, 1.0, 1.0, 2.0, 2.0, 5.0, 1.0], devices=devices, backward=True, saved=10)))
    placements = [walk.best.placement.tolist() for walk in walks]
    assert walks
    for walk, placement in zip(walks, placements, strict=True):
        assert set(placement) == set(range(devices))
        validate(draft(walk)[0])


def test_fewer_operators_than_devices_have_no_packing():
    assert not list(packed(setting_of([1.0], devices=2)))
