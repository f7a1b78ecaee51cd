"""A store whose host has ended: calls raise, and torch's warnings with C++ backtraces stay off standard error."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from panpipe.runtimes.watch.job_store import JobStore, TorchLog, _level

pytestmark = pytest.mark.skipif(_level() is None, reason="TORCH_CPP_LOG_LEVEL is set")


@pytest.fixture
def ended_store():
    """Connections to a TCPStore that has ended: torch's, and panpipe's."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False, timeout=timedelta(seconds=5))
    client.set("key", "value")
    mine = JobStore(client)
    del host
    return client, mine


def call_in_vain(store):
    with pytest.raises(RuntimeError):
        store.check(["key"])


def test_torch_itself_logs_calls_of_a_store_that_has_ended(ended_store, capfd):
    call_in_vain(ended_store[0])
    assert "frame #0" in capfd.readouterr().err


def test_job_store_logs_nothing_when_the_store_has_ended(ended_store, capfd):
    call_in_vain(ended_store[1])
    assert capfd.readouterr().err == ""


def test_log_level_is_restored_after_the_last_of_overlapping_contexts():
    log, level = TorchLog(), _level()
    before = level.value
    with log.without_warnings():
        with log.without_warnings():
            assert level.value >= 2
        assert level.value >= 2
    assert level.value == before
