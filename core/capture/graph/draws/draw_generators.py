"""The generator of a random draw: a new one for each draw; in a captured graph one that is seeded before each replay.

A CUDA graph repeats the kernels that were captured, and the numbers that they read from the host. So a draw in a graph
has a generator of its own, which is registered with the graph before the capture: the graph then reads seed and offset
from memory that each replay fills. A draw has the same numbers as outside of a graph: there, too, its generator starts
at its seed.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .draw_seeds import seed_of

_captured = threading.local()


class GraphGenerators:
    """The generators of the draws of one captured graph.

    Args:
        device: of the draws.
        ordinals: of the draws in the whole graph of the step.

    Attributes:
        all: the generators.
    """

    def __init__(self, device: torch.device, ordinals: Iterable[int]) -> None:
        self._by_ordinal = {ordinal: torch.Generator(device) for ordinal in ordinals}
        self.all = list(self._by_ordinal.values())

    def seed(self, key: Tensor) -> None:
        """Set every generator to the seed of its draw.

        Args:
            key: of the microbatch, on the host.
        """
        for ordinal, generator in self._by_ordinal.items():
            generator.manual_seed(seed_of(key, ordinal))

    def of(self, ordinal: int) -> torch.Generator:
        """The generator of a draw.

        Raises:
            RuntimeError: the graph was captured without it.
        """
        found = self._by_ordinal.get(ordinal)
        if found is None:
            raise RuntimeError(f"draw {ordinal} has no generator in this graph: it has those of {[*self._by_ordinal]}")
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which this thread's draws use these generators."""
        before, _captured.generators = getattr(_captured, "generators", None), self
        try:
            yield
        finally:
            _captured.generators = before


def graph_generators() -> GraphGenerators | None:
    """The generators of the graph that this thread captures; None outside of a capture."""
    return getattr(_captured, "generators", None)


def generator_of(key: Tensor, ordinal: int, device: torch.device) -> torch.Generator:
    """The generator of a draw, at its seed.

    Args:
        key: of the microbatch; not read in a capture.
        ordinal: of the draw in the whole graph.
        device: of the draw.
    """
    captured = graph_generators()
    if captured is not None:
        return captured.of(ordinal)
    return torch.Generator(device).manual_seed(seed_of(key, ordinal))
