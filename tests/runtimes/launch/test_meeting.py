"""The meeting of a rank: its address, the store that it joins, what it reports, and how it leaves."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from panpipe.backends import gloo
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.launch.meeting import Meeting, meet, store_address
from panpipe.runtimes.launch.rank_team import RankTeam


@pytest.fixture
def alone(monkeypatch):
    """This process as the only rank of an initialized job."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.mark.parametrize(("address", "port"), [("", "29500"), ("127.0.0.1", ""), ("127.0.0.1", "high")])
def test_rank_without_a_rendezvous_address_is_refused(monkeypatch, address, port):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(RequestError, match="start the script with torchrun"):
        store_address(1, 2)


def test_address_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert store_address(1, 2) == ("node0", 29500)


def test_meetings_of_a_process_have_keys_of_their_own(alone):
    first, second = Meeting(5.0), Meeting(5.0)
    try:
        first.store.set("key", "first")
        second.store.set("key", "second")
        assert first.store.get("key") == b"first"
        assert alone.get("panpipe/meeting/2/key") == b"second"
    finally:
        first.watch.stop()
        second.watch.stop()


def test_rank_that_has_lost_its_store_raises_the_reason(alone, monkeypatch):
    def ended():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", ended)
    with pytest.raises(WorkerError, match=r"which it hosts, is gone"):
        Meeting(5.0)


def test_missing_ranks_are_named_on_all_ranks_that_arrived():
    store, named = dist.HashStore(), {}

    def come(rank):
        try:
            meet(store, rank, 4, 0.3)
        except WorkerError as error:
            named[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert named[1] == named[3]
    assert named[1].startswith("ranks 0, 2 of 4 did not arrive within 0.3 s: ")


def test_ranks_continue_when_all_have_arrived():
    store = dist.HashStore()
    late = threading.Timer(0.2, meet, (store, 0, 2, 5))
    late.start()
    meet(store, 1, 2, 5)
    late.join()


def test_rank_that_ends_while_the_group_is_created_is_named():
    def lose():
        raise RuntimeError("Connection reset by peer")

    watch = SimpleNamespace(report=lambda failure: "rank 0 stopped answering: its process ended")
    meeting = SimpleNamespace(rank=1, size=2, watch=watch, create_group=lose)
    with pytest.raises(WorkerError, match=r"\Arank 0 stopped answering: its process ended\Z"):
        RankTeam(gloo.KIND, 5, meeting=meeting)


def test_import_in_a_rank_starts_nothing():
    """Neither a thread nor a socket, also where the environment is that of a rank."""
    code = """
import os, threading
before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
import panpipe
now = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
assert len(now) <= len(before), now
"""
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **rank}, timeout=60)
