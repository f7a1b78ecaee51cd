"""Ranks that hang are named by all the others, within the limit. Real processes."""

import re
import time

import pytest

from ...support.launch import alone

TIMEOUT_S = 2.0


def assert_named(folder, hang, said, *, victim=1, ranks=2, timeout_s=TIMEOUT_S, ended=(), **options):
    """All ranks but the victim end, and say who waits for whom, and what the victim last did.

    Args:
        hang: what the victim does.
        said: a pattern in the reason of all ranks.
        ended: ranks that end without a reason.
    """
    begun = time.monotonic()
    done = alone(
        "hanging", folder, ranks, PANPIPE_TIMEOUT_S=str(timeout_s), HANG=hang, VICTIM=str(victim),
        **{"STOPPED_S": "20", **options},
    )  # fmt: skip
    took_s = time.monotonic() - begun
    for rank, one in enumerate(done):
        if rank not in ended:
            assert one.returncode == 1, (rank, one.stderr)
            assert re.search(said, one.stderr), (rank, one.stderr)
    return done, took_s


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hang", ["loops", "sleeps", "loops_in_forward", "loads"])
def test_hang(tmp_path, hang, victim):
    done, took = assert_named(tmp_path, hang, "", victim=victim)
    for one in done:
        print(one.returncode, one.stderr)
    print(took)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hang", ["stopped", "stopped_in_action"])
def test_stopped(tmp_path, hang, victim):
    done, took = assert_named(tmp_path, hang, "", victim=victim, ranks=3)
    for one in done:
        print(one.returncode, one.stderr)
    print(took)
