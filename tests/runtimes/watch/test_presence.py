"""The end of a rank is seen before it is connected to any other one."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from panpipe.runtimes.watch import presence
from panpipe.runtimes.watch.presence import Presence

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has sockets without a file")

JOB = f"127.0.0.1:{os.getpid()}"
RANK = """
import sys
from panpipe.runtimes.watch.presence import Presence
own = Presence(sys.argv[1], int(sys.argv[2]), 3)
while not any(key.data == 0 for key in list(own._selector._fd_to_key.values())):
    pass
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(presence, "_GRACE_S", 0.3)


@pytest.fixture
def here():
    found = Presence(JOB, 0, 3)
    found.seen, found.happened = [], threading.Event()
    found.follow(lambda rank: (found.seen.append(rank), found.happened.set()))
    yield found
    found.close()


def started(rank):
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, JOB, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"here\n"
    return process


def seen(here, rank):
    while not any(key.data == rank for key in list(here._selector._fd_to_key.values())):
        here._stopped.wait(0.02)


def ended(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_rank_is_seen_and_an_absent_one_is_not(here):
    rank = started(2)
    seen(here, 2)
    ended(rank)
    assert here.happened.wait(20)
    assert (here.seen, here.ended) == ([2], 2)
    late = []
    here.follow(late.append)
    assert late == [2]


def test_rank_that_ends_at_once_is_seen_by_an_earlier_one(here, monkeypatch):
    monkeypatch.setattr(Presence, "_look_for", lambda self, rank: self._absent.append(rank))
    rank = started(1)  # finds rank 0, which does not find it
    ended(rank)
    assert here.happened.wait(20)
    assert here.ended == 1


def test_stopped_rank_and_a_child_of_a_killed_one_do_not_hide_it(here):
    rank = started(1)
    seen(here, 1)
    rank.send_signal(signal.SIGSTOP)
    assert not here.happened.wait(1)
    ended(rank)
    assert here.happened.wait(20)


@pytest.mark.parametrize("learned", ["here", "by the store"])
def test_rank_that_ends_for_another_one_names_that_one(here, learned):
    """Rank 1 knows the end of rank 2, which rank 0 has not seen."""
    first = Presence(JOB, 1, 3)
    seen(here, 1)
    first._end(2) if learned == "here" else first.blame(2)
    first.close()
    assert here.happened.wait(20)
    assert here.seen == [2]


def test_rank_that_another_process_replaces_has_not_ended(here, monkeypatch):
    monkeypatch.setattr(presence, "_GRACE_S", 20)
    before = started(1)
    seen(here, 1)
    ended(before)
    while 1 not in here._gone:
        here._stopped.wait(0.02)
    after = started(1)
    seen(here, 1)
    assert not here.happened.wait(0.5)
    assert here._gone == {}
    ended(after)


def test_child_of_a_rank_keeps_none_of_its_sockets(here):
    child = os.fork()
    if child == 0:
        os._exit(here._own.fileno() != -1)
    assert os.waitpid(child, 0)[1] == 0
    assert here._own.fileno() != -1
