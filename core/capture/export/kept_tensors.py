"""Tensors that one run of a step computes and a later run reads: Python keeps them, and a captured graph does not.

A tensor that is computed without the batch, parameters and random numbers, such as a table of positions that the first
call sets up, is a *constant*: it is the same in every run and may be kept; so may the model's buffers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..graph.nodes import written_tensors
from ..graph.storages import memory_of
from ..values.nesting import tensors_of

_NO_VALUES = ("empty", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operators whose results do not depend on the values of their arguments."""


class KeptTensors:
    """The run that computed each tensor; tensors that share memory count as one.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._run_of: dict[int, int] = {}
        self._alive: dict[int, Tensor] = {}
        self._run = 0
        self._buffers: set[int] = set()
        self._written: set[int] = set()
        self.give(parameters)

    def begin(self, batch: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        """Start a run with a batch and buffers."""
        self._run += 1
        self.give(batch)
        self._buffers = {memory_of(buffer) for buffer in buffers}

    def read(self, given: Any) -> bool:
        """Whether an argument of an operator was computed by an earlier run, and is not a buffer."""
        return any(
            0 < self._run_of.get(memory_of(tensor), 0) < self._run and memory_of(tensor) not in self._buffers
            for tensor in tensors_of(given)
        )

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a constant; a buffer that depends on the batch, parameters or random numbers is not."""
        return memory_of(tensor) not in self._run_of

    def is_written(self, tensor: Tensor) -> bool:
        """Whether any run has written a tensor in place."""
        return memory_of(tensor) in self._written

    def depends(self, func: Any, given: Any) -> bool:
        """Whether the tensors that an operator returns and writes are not constants.

        Args:
            func: the operator.
            given: its arguments, (args, kwargs).
        """
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return True
        return not takes_no_values(func) and not all(map(self.is_constant, tensors_of(given)))

    def note(self, func: Any, given: Any, result: Any) -> None:
        """Record the tensors that an operator of this run returned and wrote.

        Args:
            func, given: as in `depends`, which was true.
            result: the operator's.
        """
        for tensor in (*tensors_of(result), *written_tensors(func, *given)):
            if self._run_of.get(memory_of(tensor)) != 0:
                self._mark(tensor, self._run)

    def note_written(self, func: Any, given: Any) -> None:
        """Record the tensors that an operator writes, including constants."""
        self._written |= {memory_of(tensor) for tensor in written_tensors(func, *given)}

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors that are inputs of every run."""
        for tensor in tensors:
            self._mark(tensor, 0)

    def _mark(self, tensor: Tensor, run: int) -> None:
        memory = memory_of(tensor)
        self._run_of[memory] = run
        self._alive[memory] = tensor  # kept alive, so that no other tensor gets its memory


def takes_no_values(func: Any) -> bool:
    """Whether an operator reads only the shapes and dtypes of its arguments."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _NO_VALUES
