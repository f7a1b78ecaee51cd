"""Teams of threads and of ranks: who runs what, who is named, whose clocks differ, which mesh they have."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from panpipe.backends import gloo, memcpy
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.launch.meeting import meet, store_address
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.options import mesh_from_torch
from panpipe.runtimes.watch import positions

from ...support.launch import results

# Teams of threads: who runs what, in which thread, and what a failure does to the others.


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


WATCHING = """
import os, time
import torch.distributed as dist
import panpipe.runtimes.watch.watch as watch
watch._POLL_S, watch._READERS = 0, 1e9  # the thread is inside a call of the store nearly all of the time
watch.FailureWatch(dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1, 60.0)
time.sleep(0.05)
"""


def test_running_watch_does_not_abort_the_interpreter_at_exit():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHING], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# A team of four real ranks, two replicas of two devices: what each call returns, and failures that reach all.


def test_pipeline_goes_on_after_the_one_that_created_the_process_group_is_closed(tmp_path):
    """The group, and what the second one's watch reads in the job's store, were removed with the first one."""
    first, second = results("outlives_the_first", tmp_path, 2)
    assert first["losses"] == second["losses"] == sorted(first["losses"], reverse=True)
    assert max(first["seconds"], second["seconds"]) < 2.5
    assert (first["remains"], first["group"]) == (True, False)


# The mesh of a ``DeviceMesh``, by its names and its table.


def mesh(table, *names):
    return SimpleNamespace(mesh=torch.tensor(table), mesh_dim_names=names or None)


def test_dimensions_are_known_by_name():
    found = mesh_from_torch(mesh([[0, 1, 2], [3, 4, 5]], "dp", "pp"))
    assert (found.pipeline, found.data) == (3, 2)
    assert found.cluster_devices == (0, 1, 2, 3, 4, 5)
    turned = mesh_from_torch(mesh([[0, 1, 2], [3, 4, 5]], "pp", "dp"))
    assert (turned.pipeline, turned.data) == (2, 3)
    assert turned.replicas == ((0, 3), (1, 4), (2, 5))


def test_missing_dimension_has_one_member():
    assert (mesh_from_torch(mesh([0, 1, 2], "pp")).pipeline, mesh_from_torch(mesh([0, 1, 2], "pp")).data) == (3, 1)
    assert (mesh_from_torch(mesh([0, 1], "dp")).pipeline, mesh_from_torch(mesh([0, 1], "dp")).data) == (1, 2)


def test_tensor_ranks_are_those_of_the_model():
    found = mesh_from_torch(mesh([[[0, 1]], [[2, 3]]], "dp", "pp", "tp"))
    assert (found.pipeline, found.data, found.tensor, found.pipeline_last) == (1, 2, 2, True)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (mesh([0, 1]), "the device mesh is 2 with dimensions without names: name them pp"),
        (mesh([[[0], [1]]], "pp", "dp", "cp"), "the device mesh is 1 × 2 × 1 with dimensions pp, dp, cp"),
        (mesh([[[0], [1]]], "pp", "cp", "tp"), "mesh 'pp=1,cp=2,tp=1' has a dimension 'cp'"),
    ],
)
def test_other_dimensions_are_refused(found, said):
    with pytest.raises(RequestError, match=said):
        mesh_from_torch(found)


# The meeting of a rank: its address, the store that it joins, what it reports, and how it leaves.


@pytest.mark.parametrize(("address", "port"), [("", "29500"), ("127.0.0.1", ""), ("127.0.0.1", "high")])
def test_rank_without_a_rendezvous_address_is_refused(monkeypatch, address, port):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(RequestError, match="start the script with torchrun"):
        store_address(1, 2)


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


# Offsets between the clocks of ranks.


def test_traces_of_ranks_with_other_clocks_have_one_time_axis(tmp_path):
    """The second host was started 1,000 s earlier."""
    first, second = results("shifted", tmp_path)
    assert first == second
    assert first["step_s"] < 100
    ends = {(device, action): end for device, action, _, end in first["events"]}
    starts = {(device, action): start for device, action, start, _ in first["events"]}
    slack_s = 0.05  # half of a round trip of sockets, on a busy machine
    for microbatch in range(4):
        assert starts[1, f"1F{microbatch}"] >= ends[0, f"0F{microbatch}"] - slack_s
        assert starts[0, f"0B{microbatch}"] >= ends[1, f"1B{microbatch}"] - slack_s
