"""The blocks of V-Min, V-Half and 1F1B-V: slots by hand, passes that never share a slot, and what is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score
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
    with pytest.raises(
        RequestError, match=f"chunks is 3: {name} folds the model once, so each device has 2 stages; give 2"
    ):
        build(ScheduleProblem(2, 4, 3))


PEAKS = {
    # microbatches · 2 stages: (p + 4) // 3, where the first device may hold one stage less
    "v-min": {1: [2], 2: [3, 4], 3: [4] * 3, 4: [4] * 4, 5: [5, 6, 6, 6, 6], 8: [7, 8, 8, 7, 8, 8, 7, 8]},
    # (p + 2) // 2
    "v-half": {1: [2], 2: [4] * 2, 3: [4] * 3, 4: [6] * 4, 5: [6] * 5, 6: [8] * 6, 8: [10] * 8},
    # at most 2p / 3, rounded up
    "1f1b-v": {1: [2], 2: [4] * 2, 3: [4] * 3, 4: [6] * 4, 5: [7] * 5, 6: [8] * 6, 8: [10] * 8},
}
SPANS = {"v-min": {2: 61, 4: 107, 5: 127}, "v-half": {2: 61, 4: 101, 5: 125}, "1f1b-v": {2: 72, 4: 139, 5: 171}}
"""The step of 3p + 4 microbatches in passes: it grows with a limit that is too low, or a delay that is too long."""


@pytest.mark.parametrize("name", PEAKS)
def test_memory_and_time_of_each_number_of_devices(name):
    for devices, peaks in PEAKS[name].items():
        problem = ScheduleProblem(devices, 3 * devices + 4, 2)
        found = score(problem, find_family(name).build(problem)).result
        assert list(found.peak_memory) == peaks, devices
        assert found.makespan == SPANS[name].get(devices, found.makespan), devices
