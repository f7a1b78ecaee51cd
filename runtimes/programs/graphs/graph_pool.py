"""What a device needs for captured graphs: to capture one, and memory that all graphs of the device share.

A capture executes nothing: it records operators with the addresses of their operands. Memory that the capture frees is
given to later captures of the same pool, so graphs have to be replayed in the order in which they were captured.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ....core.capture.graph.random_draws import GraphGenerators
from .cuda_graphs import CudaGraphPool


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run it, after what was issued to the current stream."""


class GraphPool(Protocol):
    """Captures graphs on one device, with one memory."""

    def capture(self, run: Callable[[], None], generators: GraphGenerators) -> Graph:
        """Record the operators of a function, which is called once. Nothing is executed.

        Args:
            run: calls operators on tensors that exist when the graph is replayed, or that it allocates.
            generators: of its random draws.

        Raises:
            RuntimeError: it reads a value on the host.
        """

    def allocating(self) -> AbstractContextManager[None]:
        """A context in which this thread allocates tensors in the pool; not around a capture."""

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that does not keep it from being allocated again."""

    @property
    def bytes(self) -> int:
        """The memory of the pool."""


_ALONE: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def alone_on(device: torch.device) -> threading.Lock:
    """A lock of the threads of this process that share a device: one captures while no other one warms up.

    A first run of a program may wait for the whole device, as where kernels are tuned, and CUDA refuses that while
    any of the device's streams is captured.
    """
    return _ALONE[device]


_KINDS: dict[str, Callable[[torch.device], GraphPool]] = {"cuda": CudaGraphPool}


def has_graphs(device_type: str) -> bool:
    """Whether graphs can be captured on devices of a type, such as ``"cuda"``."""
    return device_type in _KINDS


def graph_pool(device: torch.device) -> GraphPool:
    """A new pool on a device."""
    return _KINDS[device.type](device)
