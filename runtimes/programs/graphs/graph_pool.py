"""What a device needs for captured graphs: to capture one, and memory that all graphs of the device share.

A capture executes nothing: it records operators with the addresses of their operands. Memory that the capture frees is
given to later captures of the same pool, so graphs have to be replayed in the order in which they were captured.

CUDA graphs were not run on a GPU yet: tests replace them by graphs that record and repeat operators on a CPU.

Devices and plans without support are refused here, and stages that are left out are named.
"""

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ....core.capture.graph.randomness import GraphGenerators
from ....core.errors import RequestError, warn_caller
from ....core.policies.sharding import LEVELS, part_of_gradients
from ..compiled import Compiled

_INVALID: list[Any] = []
"""Graphs whose capture could not be ended, with their pools. The allocator still calls them (``capture_end`` in
``CUDAGraph.cpp`` raises before it notifies the allocator), so they are kept; their pools take no other capture."""


class CudaGraphPool:
    """Captures CUDA graphs on one GPU, with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = self._new_pool()
        # An action may have nothing to do, such as I of a stage whose inputs need no gradients.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")

    def _new_pool(self) -> Any:
        with torch.cuda.device(self._device):
            return torch.cuda.MemPool()

    def capture(self, run: Callable[[], None], generators: GraphGenerators) -> "CudaGraph":
        """Record the operators of a function, which is called once. Nothing is executed; other threads may use the GPU.

        Args:
            run: calls operators on tensors that exist when the graph is replayed, or that it allocates.
            generators: of its random draws.

        Raises:
            RuntimeError: it reads a value on the host.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators.all:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
        try:
            with generators.active():
                run()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the capture is invalid, and the first error says why
                _INVALID.append((graph, self._pool))
                self._pool = self._new_pool()
            raise
        graph.capture_end()
        return CudaGraph(graph, self._pool)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """A context in which this thread allocates tensors in the pool; not around a capture."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that does not keep it from being allocated again."""
        if not tensor.numel():
            return tensor
        memory = torch.as_tensor(_Memory(tensor.data_ptr(), extent_of(tensor)), device=self._device)
        return viewed_as(tensor, memory)

    @property
    def bytes(self) -> int:
        """The memory of the pool."""
        return sum(segment["total_size"] for segment in self._pool.snapshot())


def extent_of(tensor: Tensor) -> int:
    """Bytes from the first to the last number of a tensor that has some."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def viewed_as(tensor: Tensor, memory: Tensor) -> Tensor:
    """Bytes as a tensor of the dtype and layout of another one, which may be a lazy conjugate or negation."""
    found = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


@frozen
class CudaGraph:
    """A captured graph; it keeps its pool, which has to be destroyed after it."""

    _graph: torch.cuda.CUDAGraph
    _pool: Any

    def replay(self) -> None:
        """Run it, after what was issued to the current stream."""
        self._graph.replay()


class _Memory:
    """Bytes on a GPU that PyTorch makes a tensor of without owning them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


_ALONE: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def alone_on(device: torch.device) -> threading.Lock:
    """A lock of the threads of this process that share a device: one captures while no other one warms up.

    A first run of a program may wait for the whole device, as where kernels are tuned, and CUDA refuses that while
    any of the device's streams is captured.
    """
    return _ALONE[device]


_KINDS: dict[str, Callable[[torch.device], CudaGraphPool]] = {"cuda": CudaGraphPool}


def has_graphs(device_type: str) -> bool:
    """Whether graphs can be captured on devices of a type, such as ``"cuda"``."""
    return device_type in _KINDS


def graph_pool(device: torch.device) -> CudaGraphPool:
    """A new pool on a device."""
    return _KINDS[device.type](device)


def check_device(device_type: str) -> None:
    """Refuse devices that have no graphs.

    Args:
        device_type: of all stages, such as ``"cuda"``.

    Raises:
        RequestError: they have none.
    """
    if not has_graphs(device_type):
        raise RequestError(
            f"cuda_graphs=True needs CUDA devices, and the model would be on {device_type}: give devices='cuda' where "
            "there are GPUs, or leave cuda_graphs out"
        )


def check_plan(levels: Sequence[str], offloads: bool) -> None:
    """Refuse what graphs do not support.

    Args:
        levels: what replicas share; by stage, or as the user asked.
        offloads: whether saved tensors are offloaded. A graph reads one at the address at which the capture saved it.

    Raises:
        RequestError: saved tensors are offloaded; or replicas share gradients or parameters: gradients are then sent
            during a backward, and the memory of parameters moves.
    """
    found = next((level for level in levels if level in LEVELS and part_of_gradients(level)), None)
    if found is not None:
        raise RequestError(
            f"cuda_graphs=True does not support shard='{found}': backwards then communicate, and a graph repeats "
            "operators of one device alone; use Memory(shard='optimizer'), or leave cuda_graphs out"
        )
    if offloads:
        raise RequestError(
            "cuda_graphs=True does not support offload: graphs read saved tensors at fixed addresses, and an offloaded "
            "one comes back at another; use Memory(recompute=), or leave cuda_graphs out"
        )


def warn_of_ungraphed(compiled: Compiled) -> None:
    """Warn of the stages of this process that have no graphs; the others of their devices run without, too."""
    for stage, programs in compiled.programs.items():
        reason = programs.host_read and f"{programs.host_read} reads values on the host"
        if compiled.runs_python(stage):
            reason = "a part of it stays Python (`panpipe doctor` names the line)"
        if reason is not None:
            warn_caller(f"stage {stage} runs without CUDA graphs, as do all of its device: {reason}")
