"""The blocks of V-Min, V-Half and 1F1B-V: slots by hand, passes that never share a slot, and what is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.v_shaped import (
    PERIOD,
    one_f_one_b_v_slots,
    v_half,
    v_half_slots,
    v_min,
    v_min_slots,
)

from ...support.plans import table


def test_slots_of_four_devices_by_hand():
    # Controllable Memory, figure 3: the forward reaches device 3 in slot 3 and comes back to device 0 in slot 7.
    assert [v_min_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 15), (3, 4, 11, 12)]
    # V-Half takes two slots a stage on the way there and one on the way back.
    assert [v_half_slots(d, 3) for d in range(3)] == [(0, 7, 8, 16), (2, 6, 10, 15), (4, 5, 12, 14)]
    assert [one_f_one_b_v_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 22), (3, 4, 14, 16)]


@pytest.mark.parametrize("slots", [v_min_slots, v_half_slots])
def test_passes_of_a_device_never_share_a_slot_of_the_period(slots):
    for devices in range(1, 25):
        for device in range(devices):
            places = [slot % PERIOD for slot in slots(device, devices)]
            assert len(set(places)) == 4, (devices, device, places)


@pytest.mark.parametrize("slots", [v_min_slots, v_half_slots])
def test_later_delays_both_backwards_alone(slots):
    before, after = slots(1, 5), slots(1, 5, 3)
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0, 3, 3]


def test_v_min_of_one_device_runs_one_microbatch_at_a_time():
    assert table("v-min", 1, 2, 2) == ["0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"]


@pytest.mark.parametrize(("build", "name"), [(v_min, "v-min"), (v_half, "v-half")])
def test_folded_schedules_refuse_other_than_two_chunks(build, name):
    with pytest.raises(RequestError, match=f"{name} with 3 chunks: it folds the model once; give 2 chunks"):
        build(ScheduleProblem(2, 4, 3))
