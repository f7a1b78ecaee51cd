"""The origins of the tensors that a run's operators take: which parameter, buffer, batch tensor or earlier operator.

Two runs with the same operators, shapes and numbers still differ if they take another tensor of the same shape, as a
step does that alternates between two layers by a count of its calls.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..graph.storages import memory_of
from ..values.nesting import tensors_of


class Operands:
    """The origins of the tensors of one run; tensors that share memory have one.

    Args:
        named: the tensors that the run starts with, each with its name; the first name of a tensor counts.
    """

    def __init__(self, named: Iterable[tuple[Hashable, Tensor]]) -> None:
        self._origin_of: dict[int, Hashable] = {}
        self._alive: list[Tensor] = []  # kept alive, so that no other tensor gets their memory
        for name, tensor in named:
            self._note(name, tensor)

    def origin(self, tensor: Tensor) -> Hashable:
        """The origin of a tensor with its place in that memory; None for tensors of another run or from elsewhere."""
        found = self._origin_of.get(memory_of(tensor))
        return None if found is None else (found, tensor.storage_offset() if tensor.layout == torch.strided else 0)

    def note(self, number: int, result: Any) -> None:
        """Record what an operator returned.

        Args:
            number: of the operator in the run.
            result: its tensors.
        """
        for place, tensor in enumerate(tensors_of(result)):
            self._note((number, place), tensor)

    def _note(self, origin: Hashable, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if memory not in self._origin_of:
            self._origin_of[memory] = origin
            self._alive.append(tensor)
