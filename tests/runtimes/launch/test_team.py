"""Teams of threads: who runs what, in which thread, and what a failure does to the others."""

import threading
import time

import pytest
import torch
from panpipe.backends import gloo, memcpy
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.watch import positions


@pytest.fixture
def team():
    team = ThreadTeam(3)
    yield team
    team.close()


def test_failure_of_a_device_wakes_those_that_wait_for_it_and_is_raised_with_its_number(team):
    cause = ValueError("no such file")

    def work(device):
        if device == 1:
            raise cause
        team.backend(device).receive([torch.zeros(1)], 1).wait()

    with pytest.raises(WorkerError, match=r"^device 1 stopped: ValueError: no such file$") as raised:
        team.run_local(work)
    assert raised.value.__cause__ is cause
    assert team.everywhere(lambda device: device) == [0, 1, 2]


def test_transport_that_connects_no_threads_or_no_ranks_is_refused():
    with pytest.raises(RequestError, match="backend 'gloo' connects no threads: give ranks, or another backend"):
        ThreadTeam(2, gloo.KIND).run_local(lambda device: device)
    with pytest.raises(RequestError, match="backend 'memcpy' connects no ranks: give threads, or another backend"):
        RankTeam(memcpy.KIND)


def test_device_that_hangs_is_named_and_its_team_refuses_further_work(monkeypatch):
    at_exit, over = [], threading.Event()
    monkeypatch.setattr(positions.atexit, "register", at_exit.append)
    team = ThreadTeam(2, timeout_s=0.5)

    def work(device):
        if device == 1:
            over.wait()
        else:
            team.backend(0).receive([torch.empty(1)], 1).wait()

    said = (
        r"device 0 waited [\d.]+ s for device 1 in step 1; device 1 has been in step 1 for [\d.]+ s: see what it does"
    )
    with team.inside("step 1"), pytest.raises(WorkerError, match=said):
        team.run_local(work)
    over.set()
    assert at_exit == [positions.end_process]  # the interpreter would wait for the thread, or abort
    with pytest.raises(WorkerError, match=said):
        team.run_local(lambda device: device)


def test_devices_that_compute_for_longer_than_the_limit_are_no_hang():
    def work(device):
        time.sleep(0.6)
        return device

    team = ThreadTeam(2, timeout_s=0.2)
    assert team.run_local(work) == {0: 0, 1: 1}
    team.close()
