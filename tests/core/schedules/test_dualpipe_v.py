"""DualPipe-V as a table a person can read, next to the steps of the published implementation, and what it refuses."""

import pytest
from panpipe.core.errors import RequestError

from ...support.plans import table


def test_dualpipe_v_of_two_devices_by_hand():
    # DeepSeek's DualPipeV, rank 0: 2 × F, F F, then I W F; one main step; B F B; B with its second half split; W I; W.
    assert table("dualpipe-v", 2, 4, 2) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_dualpipe_v_omits_microbatches_that_do_not_exist():
    assert table("dualpipe-v", 2, 1, 2) == ["0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_dualpipe_v_refuses_other_than_two_chunks(chunks):
    with pytest.raises(
        RequestError, match=f"chunks is {chunks}: dualpipe-v folds the model once, so each device has 2 stages"
    ):
        table("dualpipe-v", 2, 4, chunks)
