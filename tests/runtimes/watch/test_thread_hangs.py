"""Hangs between devices that are threads of one process."""

from concurrent.futures import Future

import pytest
from panpipe.core.errors import WorkerError
from panpipe.runtimes.watch import positions
from panpipe.runtimes.watch.activity import Activity
from panpipe.runtimes.watch.positions import ThreadHangs


@pytest.fixture
def registered(monkeypatch):
    found = []
    monkeypatch.setattr(positions.atexit, "register", found.append)
    return found


def done():
    future = Future()
    future.set_result(None)
    return future


def test_devices_that_are_done_are_no_hang(registered):
    hangs = ThreadHangs({0: Activity(), 1: Activity()}, 0.1)
    assert hangs.wait({0: done(), 1: done()}) is None
    hangs.refuse_after_hang()
    assert registered == []


def test_device_that_waits_for_one_that_is_done_is_a_hang(registered):
    activities = {0: Activity(what="0B3", on=(1,), method="step 4"), 1: Activity(method="step 4")}
    hangs = ThreadHangs(activities, 0.1)
    found = hangs.wait({0: Future(), 1: done()})
    assert "device 0 waited" in str(found)
    assert "for device 1 in step 4 at 0B3; device 1 has been done with step 4" in str(found)
    with pytest.raises(WorkerError, match="device 0 waited"):
        hangs.refuse_after_hang()
    assert registered == [positions.end_process]


def test_where_has_a_line_for_each_device():
    activities = {0: Activity(what="0F1", method="step 4", stages=(0,)), 1: Activity(on=(0,), method="step 4")}
    lines = ThreadHangs(activities, 60.0).where().splitlines()
    assert lines[0] == "devices of this process"
    assert lines[1].startswith("  device 0 (stage 0) has been in step 4 at 0F1 for ")
    assert "for device 0 in step 4" in lines[2]
