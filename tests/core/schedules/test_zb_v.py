"""ZB-V: its forwards and backwards as a table, W in idle time, no bubble, and what it refuses."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.scored import score
from panpipe.core.schedules.zb_v import zb_v

from ...support.plans import table


def test_zb_v_forwards_and_input_gradients_of_two_devices_by_hand():
    rows = [" ".join(word for word in row.split() if "W" not in word) for row in table("zb-v", 2, 3, 2)]
    assert rows == [
        "0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3F2 3I2 0I1 0I2",
        "1F0 2F0 1F1 2F1 2I0 1F2 1I0 2F2 2I1 1I1 2I2 1I2",
    ]


def test_zb_v_has_no_bubble_where_all_passes_take_equally_long():
    # At least 2 p microbatches; the paper's ideal case.
    for devices in (2, 3, 4):
        problem = ScheduleProblem(devices, 2 * devices, 2, [StageCosts(1, 1, 1, saved_bytes=1)] * 2 * devices)
        assert score(problem, zb_v(problem)).result.stage_span_bubble_ratio == 0


def test_zb_v_refuses_other_than_two_chunks():
    with pytest.raises(
        RequestError, match="chunks is 1: zb-v folds the model once, so each device has 2 stages; give 2"
    ):
        zb_v(ScheduleProblem(2, 4))
