"""The memory on the host of one device: it grows, stays, ends with what refers to it, and is pinned if possible."""

import gc
import os
import threading

import pytest
import torch
from panpipe.backends import streams
from panpipe.runtimes.offload import host_memory
from panpipe.runtimes.offload.copies import Part
from panpipe.runtimes.offload.host_memory import HostMemory, pin, unpin
from panpipe.runtimes.offload.tier import OffloadTier

from ...support.backends.recorded_streams import RecordedStreams

CPU = torch.device("cpu")


def data(size):
    return torch.arange(size).to(torch.uint8)


def test_threads_and_files_end_with_what_refers_to_them(tmp_path):
    before = set(threading.enumerate())
    memory = HostMemory(OffloadTier(tmp_path), torch.device("cpu"), 0)
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
    monkeypatch.setattr(host_memory, "pin", lambda memory, device: False)
    monkeypatch.setattr(host_memory, "lockable_bytes", lambda: left)
    memory = HostMemory(OffloadTier(), gpu, 0)
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
