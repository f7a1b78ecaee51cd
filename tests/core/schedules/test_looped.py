"""The looped family, as tables a person can read, and what it refuses."""

import pytest
from panpipe.core.errors import RequestError

from ...support.plans import table


def test_looped_has_interleaved_1f1b_and_1f1b_and_gpipe_as_members():
    assert table("looped", 3, 6, 2) == table("interleaved-1f1b", 3, 6, 2)
    assert table("looped", 3, 6) == table("1f1b", 3, 6)
    assert table("looped", 3, 6, 2, microbatches_per_loop=6, run_ahead=[12] * 3) == table("gpipe", 3, 6, 2)


def test_looped_deadlock_across_devices_is_refused():
    with pytest.raises(RequestError, match=r"the order deadlocks: 6F2 waits for 5F2 .*5B0 waits for 6B0"):
        table("looped", 6, 12, 2, microbatches_per_loop=1, run_ahead=[20, 2, 2, 2, 2, 2])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"microbatches_per_loop": 0}, "at least 1"),
        ({"run_ahead": [3]}, "one for each of the 2 devices"),
        ({"run_ahead": [3, 0]}, "at least one forward"),
        ({"run_ahead": [4, 2]}, "run-ahead 4,2 cannot run: the order deadlocks: 3B0 waits for 3F0"),
    ],
)
def test_looped_refuses_wrong_parameters(parameters, message):
    with pytest.raises(RequestError, match=message):
        table("looped", 2, 4, 2, **parameters)
