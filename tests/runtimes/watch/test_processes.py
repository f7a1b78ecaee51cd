"""The end of a rank's process on this host is seen, once; ranks of other hosts are not looked for."""

import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from panpipe.runtimes.watch import processes
from panpipe.runtimes.watch.processes import Processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has descriptors of processes")


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def ends(watched, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := watched.ended()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_end_of_a_process_is_seen_once_before_anybody_waits_for_it(child):
    store = dist.HashStore()
    watched = Processes(store, 0)
    assert watched.ended() == []
    store.append(watched._key, f"1 {child.pid}\n")
    assert watched.ended() == []
    child.kill()  # it stays a zombie
    assert ends(watched) == [1]
    assert watched.ended() == []
    watched.close()


def test_process_that_ended_before_it_was_looked_for_is_seen(child):
    store = dist.HashStore()
    watched = Processes(store, 0)
    child.kill()
    child.wait()
    store.append(watched._key, f"1 {child.pid}\n")
    assert watched.ended() == [1]


def test_ranks_of_other_hosts_are_not_looked_for(monkeypatch):
    store = dist.HashStore()
    first = Processes(store, 0)
    monkeypatch.setattr(processes, "_host", lambda: "another")
    Processes(store, 1)
    assert first.ended() == []
    assert first._known == {0}
