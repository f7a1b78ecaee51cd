"""Times of kernels: sequences of calls, the shortest of several runs, and the sizes of the bundled cases."""

import pytest
import torch
from panpipe.answers.kernel_profile import least_s
from panpipe.backends import streams

from ..support.backends.watched_streams import WatchedStreams

CPU = torch.device("cpu")


@pytest.fixture
def recorded(monkeypatch):
    found = WatchedStreams()
    monkeypatch.setitem(streams._KINDS, "cpu", found)
    return found


def test_kernel_profile_times_sequences_of_calls(recorded):
    x = torch.randn(4)
    calls = []
    seconds = least_s(lambda: calls.append(x + 1), CPU, repeats=2)
    assert seconds == pytest.approx(1e-6)
    waits = [i for i, what in enumerate(recorded.asked) if what == "wait"]
    assert recorded.asked[waits[0] + 1 : waits[1]] == ["moment"] * 4, "both runs are read after the last"
