"""CUDA graphs. Not run on a GPU yet: tests replace this module by graphs that record and repeat operators on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ....core.capture.graph.draws.draw_generators import GraphGenerators


class CudaGraphPool:
    """Captures CUDA graphs on one GPU, with one memory pool.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()

    def capture(self, run: Callable[[], None], generators: GraphGenerators) -> "_CudaGraph":
        """See `GraphPool.capture`. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators.all:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
        try:
            with generators.active():
                run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid, and the first error says why
                graph.capture_end()
            raise
        graph.capture_end()
        return _CudaGraph(graph, self._pool)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """See `GraphPool.allocating`."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def alias(self, tensor: Tensor) -> Tensor:
        """See `GraphPool.alias`."""
        if not tensor.numel():
            return tensor
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        found = torch.as_tensor(_Memory(tensor.data_ptr(), extent * tensor.itemsize), device=self._device)
        return found.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @property
    def bytes(self) -> int:
        """See `GraphPool.bytes`."""
        segments = self._pool.snapshot(include_traces=False)
        return sum(segment["total_size"] for segment in segments)


@frozen
class _CudaGraph:
    """A captured graph; it keeps its pool, which has to be destroyed after it."""

    _graph: torch.cuda.CUDAGraph
    _pool: Any

    def replay(self) -> None:
        self._graph.replay()


class _Memory:
    """Bytes on a GPU that PyTorch makes a tensor of without owning them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
