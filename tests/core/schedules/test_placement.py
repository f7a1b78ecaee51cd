"""Placements: round the devices, there and back, and the hook at the turn."""

import pytest
from panpipe.core.schedules.problem import folded_placement, hooked_placement, looped_placement


def test_loops_go_round_the_devices():
    assert looped_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert looped_placement(1, 3) == (0, 0, 0)


def test_folds_turn_at_the_last_and_at_the_first_device():
    assert folded_placement(3, 2) == (0, 1, 2, 2, 1, 0)
    assert folded_placement(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)


def test_hook_swaps_the_two_devices_after_the_turn():
    assert hooked_placement(4) == (0, 1, 2, 3, 2, 3, 1, 0)


@pytest.mark.parametrize("devices", [2, 3, 7])
def test_every_device_holds_as_many_stages(devices):
    for placement in (looped_placement(devices, 3), folded_placement(devices, 3), hooked_placement(devices)):
        assert len({placement.count(device) for device in range(devices)}) == 1
        assert set(placement) == set(range(devices))
