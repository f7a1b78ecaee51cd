"""The blocks of V-Min, V-Half and 1F1B-V: slots by hand, passes that never share a slot, and what is refused."""

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.v_shaped import (
    one_f_one_b_v_slots,
    v_half,
    v_half_slots,
    v_min,
    v_min_slots,
)


def test_slots_of_four_devices_by_hand():
    # Controllable Memory, figure 3: the forward reaches device 3 in slot 3 and comes back to device 0 in slot 7.
    assert [v_min_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 15), (3, 4, 11, 12)]
    # V-Half takes two slots a stage on the way there and one on the way back.
    assert [v_half_slots(d, 3) for d in range(3)] == [(0, 7, 8, 16), (2, 6, 10, 15), (4, 5, 12, 14)]
    assert [one_f_one_b_v_slots(d, 4) for d in (0, 3)] == [(0, 7, 8, 22), (3, 4, 14, 16)]


@pytest.mark.parametrize(("build", "name"), [(v_min, "v-min"), (v_half, "v-half")])
def test_folded_schedules_refuse_other_than_two_chunks(build, name):
    with pytest.raises(
        RequestError, match=f"chunks is 3: {name} folds the model once, so each device has 2 stages; give 2"
    ):
        build(ScheduleProblem(2, 4, 3))
