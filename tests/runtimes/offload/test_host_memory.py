"""The memory of the host: what is refused, how it grows and ends, and the same bits on ranks and in all tests."""

import gc
import os
import threading

import panpipe
import pytest
import torch
from panpipe.backends import streams
from panpipe.core.errors import RequestError
from panpipe.runtimes import trainer
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.offload import device_offload
from panpipe.runtimes.offload.copies import MemoryArena, Part
from panpipe.runtimes.offload.device_offload import DeviceOffload, pin, unpin
from panpipe.runtimes.offload.tier import OffloadTier

from ...laws.grouped import grouped
from ...support.backends.forced_offload import PLAIN, VARIABLE, force_offload
from ...support.backends.recorded_streams import RecordedStreams
from ...support.cuts import captured_once, even_plan
from ...support.launch import alone, results
from ...support.models import CASES
from ...support.offloading import all_away
from ...support.parity import PLANS, build
from ...support.programs.offload_features import FEATURES, check

# The memory on the host of one device: it grows, stays, ends with what refers to it, and is pinned if possible.


CPU = torch.device("cpu")


def data(size):
    return torch.arange(size).to(torch.uint8)


def test_threads_and_files_end_with_what_refers_to_them(tmp_path):
    before = set(threading.enumerate())
    memory = DeviceOffload(OffloadTier(tmp_path), torch.device("cpu"), 0)
    memory.reserve(1 << 16)
    file = memory._arena._file
    (thread,) = memory.copies._threads
    memory.copies.out([Part(data(1 << 16), 0)]).wait()
    assert set(threading.enumerate()) - before == {thread}
    del memory
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.parametrize(
    ("left", "named"), [(None, ""), (1 << 40, ""), (32, r" \(ulimit -l leaves 32 bytes\)")]
)  # fmt: skip
def test_memory_that_is_not_pinned_is_used_pageable_with_one_warning(monkeypatch, left, named):
    gpu, recorded = torch.device("cuda", 0), RecordedStreams()
    monkeypatch.setitem(streams._KINDS, "cuda", recorded)
    monkeypatch.setattr(device_offload, "pin", lambda memory, device: False)
    monkeypatch.setattr(device_offload, "lockable_bytes", lambda: left)
    memory = DeviceOffload(OffloadTier(), gpu, 0)
    said = f"the host pins no 64 bytes for the saved tensors of device 0{named}: copies use pageable memory"
    with pytest.warns(UserWarning, match=said) as warned:
        memory.reserve(64)
    assert len(warned) == 1
    memory.close()


class Runtime:
    """CUDA's runtime, whose locks of memory fail or not."""

    def __init__(self, status):
        self.status, self.unpinned = status, []

    def cudaHostRegister(self, address, size, flags):
        return self.status

    def cudaHostUnregister(self, address):
        self.unpinned.append(address)


@pytest.mark.parametrize("status", [0, 2])
def test_error_of_memory_that_is_not_pinned_is_raised_by_no_later_kernel(monkeypatch, status):
    errors = [status] if status else []

    def ones(*size, device):
        if errors:
            raise RuntimeError(f"CUDA error {errors.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(status))
    monkeypatch.setattr(torch, "ones", ones)
    assert pin(data(64), CPU) is (status == 0)
    assert errors == []


def test_memory_is_unpinned_after_the_gpu_that_copies_it_has_finished(monkeypatch):
    runtime, memory, waited = Runtime(0), data(64), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    unpin(memory, torch.device("cuda", 1))
    assert (waited, runtime.unpinned) == ([torch.device("cuda", 1)], [memory.data_ptr()])


# What ``panpipe.pipeline`` refuses of ``offload``, ``offload_to`` and ``host_memory``, before it measures anything.


F32 = torch.float32
CASE = CASES["tied gpt with dropout"]


def asked(**options):
    panpipe.pipeline(
        CASE.model(F32), CASE.step, CASE.batch(8, F32), **grouped(microbatches=4, progress=False, **options)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "most"}, "offload is 'most': give 'none', 'all', 'auto', or the share of each stage"),
        ({"offload": {0: 1.5}}, "offload of stage 0 is 1.5: give a share from 0 to 1"),
        ({"offload": {0: -0.1}}, "offload of stage 0 is -0.1: give a share from 0 to 1"),
        ({"offload": {-1: 1.0}}, "offload names stage -1: stages are numbered from 0"),
        ({"offload": {4: 1.0}, "mesh": 2}, "offload names stage 4, and the plan has stages 0 to 3: name those"),
        ({"offload_to": "/no/such/folder"}, "offload_to is '/no/such/folder': give 'host', 'disk'"),
        ({"host": -1}, "host is -1: give bytes"),
    ],
)
def test_requests_that_no_plan_can_have_are_refused_in_one_line(options, said):
    with pytest.raises(RequestError, match=said) as refused:
        asked(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("none", r"offload is 'none' and the plan has offload of stages \[0, 1\]"),
        ({2: 1.0}, "offload names stage 2, and the plan has stages 0 to 1"),
    ],
)
def test_a_plan_that_contradicts_the_request_is_refused(offload, said):
    operators = captured_once(CASE, F32, 8, 4)
    plan = all_away(even_plan(operators, 2, 4, "gpipe"), operators)
    with pytest.raises(RequestError, match=said):
        asked(plan=plan, offload=offload)


# Ranks over gloo whose saved tensors leave: the same bits, and all of them stop when a file is full.


def test_two_ranks_have_the_same_bits_with_offload_to_the_host_and_to_a_file(tmp_path):
    for found in results("offloading", tmp_path):
        check(found)
        assert len(found) == 2


def test_a_full_disk_ends_all_ranks_with_its_name_and_leaves_the_checkpoint(tmp_path):
    left, stopped = alone("full_disk", tmp_path)
    assert (left.returncode, stopped.returncode) == (1, 1)
    full = f"OSError: [Errno 27] File too large: 'file of saved tensors in {tmp_path}'"
    assert f"rank 1 stopped: OffloadError: offload of saved tensors failed: {full}" in left.stderr
    assert full in stopped.stderr
    pipe = build(ThreadTeam(2), "tied gpt with dropout", torch.float32, 12, None, 6)
    pipe.resume(tmp_path / "checkpoint")
    assert pipe.metrics.steps == 1
    pipe.close()


@pytest.mark.slow
def test_replicas_that_share_have_the_same_bits_with_offload(tmp_path):
    first, second = results("offloading_replicas", tmp_path, MESH="dp=2,pp=1")
    check(first)
    check(second)
    assert len(first) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=1", "pp=2,dp=2"])
def test_features_have_the_same_bits_with_offload_over_ranks(tmp_path, mesh):
    for found in results("offloading_features", tmp_path, 4 if mesh == "pp=2,dp=2" else 2, MESH=mesh):
        check(found)
        assert len(found) >= len(FEATURES)


# The environment variable that makes all tests offload has pipelines offload, to the same bits.


GPT = "tied gpt with dropout"


@pytest.mark.parametrize("wanted", ["1", "late"])
def test_forced_offload_copies_and_changes_no_bit(monkeypatch, wanted):
    batch, losses, copies = CASES[GPT].batch(8, torch.float32), [], []
    for forced in ("", wanted):
        monkeypatch.setenv(VARIABLE, forced)
        monkeypatch.setattr(trainer, "set_up_plan", PLAIN)  # restored after the test, as the next two are
        for name in ("write", "read"):
            monkeypatch.setattr(MemoryArena, name, getattr(MemoryArena, name))
        force_offload()
        pipe = build(ThreadTeam(2), GPT, torch.float32, 8, None, 4, **PLANS["gpipe"])
        losses += [pipe.step(batch).clone()]
        copies.append(sum(len(each.copies) for each in pipe.plan.memory.offload))
        pipe.close()
    assert torch.equal(*losses)
    assert copies[0] == 0 < copies[1]
