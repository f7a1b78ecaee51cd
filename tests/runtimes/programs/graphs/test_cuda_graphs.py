"""Calls of torch's CUDA graphs, in their order. No test here runs CUDA: doubles have the place of torch's classes."""

import ctypes
from contextlib import contextmanager, nullcontext

import pytest
import torch
from panpipe.core.capture.graph.randomness import GraphGenerators, graph_generators
from panpipe.runtimes.programs.graphs.graph_pool import _INVALID, CudaGraphPool

CPU = torch.device("cpu")


class Pool:
    def __init__(self):
        self.id = 0, 7 + len(POOLS)
        POOLS.append(self)

    def snapshot(self):
        return [{"total_size": 100}, {"total_size": 20}]


class Graph:
    def __init__(self):
        self.calls = GRAPHS

    def register_generator_state(self, generator):
        self.calls.append(("register", generator))

    def capture_begin(self, **given):
        self.calls.append(("begin", given))

    def capture_end(self):
        self.calls.append("end")
        if "invalid" in self.calls:
            raise RuntimeError("the capture is invalid")

    def replay(self):
        self.calls.append("replay")


GRAPHS, POOLS = [], []


@contextmanager
def used(pool, device):
    GRAPHS.append(("allocate", pool.id, device))
    yield
    GRAPHS.append("allocated")


@pytest.fixture
def pool(monkeypatch):
    GRAPHS.clear()
    POOLS.clear()
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", used)
    return CudaGraphPool(CPU)


def test_generators_are_registered_before_the_capture_and_active_in_it(pool):
    generators = GraphGenerators(CPU, [1, 2])
    graph = pool.capture(lambda: GRAPHS.append(graph_generators()), generators)
    assert [
        *(("register", each) for each in generators.all),
        ("begin", {"pool": (0, 7), "capture_error_mode": "thread_local"}), generators, "end",
    ] == GRAPHS  # fmt: skip
    graph.replay()
    assert GRAPHS[-1] == "replay"


def test_failed_capture_is_ended_and_raises_its_own_error(pool):
    def run():
        GRAPHS.append("invalid")
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        pool.capture(run, GraphGenerators(CPU, []))
    assert GRAPHS[-1] == "end"
    assert graph_generators() is None
    assert _INVALID.pop()[1] is POOLS[0]
    GRAPHS.clear()
    pool.capture(lambda: None, GraphGenerators(CPU, []))
    assert GRAPHS[0][1]["pool"] == POOLS[1].id, "the pool of an invalid capture takes no other one"


def as_host_tensor(memory, device):
    """As torch makes a tensor of a CUDA array, for memory of the host."""
    interface = memory.__cuda_array_interface__
    assert interface["typestr"] == "|u1"
    size = interface["shape"][0]
    return torch.frombuffer((ctypes.c_byte * size).from_address(interface["data"][0]), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_alias_has_the_memory_and_the_layout_of_a_tensor(dtype, pool, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", as_host_tensor)
    tensor = torch.ones(4, 6).to(dtype)
    for view in (tensor, tensor.t(), tensor[1:, ::2], tensor[0, 0]):
        alias = pool.alias(view)
        assert (alias.data_ptr(), alias.shape, alias.stride()) == (view.data_ptr(), view.shape, view.stride())
        assert alias.dtype is dtype
        assert alias.untyped_storage()._cdata != view.untyped_storage()._cdata
        assert torch.equal(alias, view)
    values = torch.randn(3, 2, dtype=torch.complex64)
    for lazy in (values.conj(), values.conj().imag, values.t().conj()):
        assert torch.equal(pool.alias(lazy), lazy)
    empty = torch.empty(0)
    assert pool.alias(empty) is empty
