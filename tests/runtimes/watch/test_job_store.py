"""A store whose host has ended: calls raise, and torch's warnings with C++ backtraces stay off standard error."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from panpipe.runtimes.watch.job_store import JobStore
from panpipe.runtimes.watch.torch_log import TORCH_LOG, TorchLog

pytestmark = pytest.mark.skipif(TORCH_LOG._level is None, reason="TORCH_CPP_LOG_LEVEL is set")


@pytest.fixture
def ended_store():
    """A connection to a TCPStore that has ended."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False, timeout=timedelta(seconds=5))
    client.set("key", "value")
    del host
    return client


def call_in_vain(store):
    with pytest.raises(RuntimeError):
        store.check(["key"])


def test_torch_itself_logs_calls_of_a_store_that_has_ended(ended_store, capfd):
    call_in_vain(ended_store)
    assert "frame #0" in capfd.readouterr().err


def test_job_store_logs_nothing_when_the_store_has_ended(ended_store, capfd):
    call_in_vain(JobStore(ended_store, threading.Event()))
    assert capfd.readouterr().err == ""


def test_job_store_makes_no_call_after_the_end_of_its_host():
    ended, store = threading.Event(), dist.HashStore()
    mine = JobStore(store, ended)
    mine.set("key", "before")
    assert (mine.get("key"), mine.check(["key", "none"]), mine.add("number", 2)) == (b"before", False, 2)
    assert (mine.compare_set("new", "", "first"), mine.multi_get(["key", "new"])) == (b"first", [b"before", b"first"])
    ended.set()
    for call in (lambda: mine.set("key", "after"), lambda: mine.get("key"), lambda: mine.check(["key"])):
        with pytest.raises(RuntimeError, match="has ended"):
            call()
    assert store.get("key") == b"before"


def test_log_level_is_restored_after_the_last_of_overlapping_contexts():
    log = TorchLog()
    before = log._level.value
    with log.without_warnings():
        with log.without_warnings():
            assert log._level.value >= 2
        assert log._level.value >= 2
    assert log._level.value == before


def test_log_level_that_the_user_has_set_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    with TorchLog().without_warnings():
        assert TORCH_LOG._level.value == 1
