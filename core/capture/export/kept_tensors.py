"""Tensors that one run of a step computes and a later run reads: Python keeps them, and a captured graph does not.

What is computed from neither the batch, a parameter nor random numbers, such as a table of positions that the first
call sets up, is a *constant*: it is the same in every run and may be kept; so may the model's buffers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..graph.storages import storage_of
from ..values.nesting import tensors_of

_NO_VALUES = ("empty", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operators whose results have nothing of the values that are given to them."""


class KeptTensors:
    """Which run computed what; tensors that share memory are one.

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
        """Begin a run with a batch and these buffers."""
        self._run += 1
        self.give(batch)
        self._buffers = {_memory(buffer) for buffer in buffers}

    def read(self, given: Any) -> bool:
        """Whether a tensor among what an operator is given was computed by an earlier run, and is no buffer."""
        return any(
            0 < self._run_of.get(_memory(tensor), 0) < self._run and _memory(tensor) not in self._buffers
            for tensor in tensors_of(given)
        )

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor does not depend on the batch, a parameter or a random number, nor is a buffer that does."""
        return _memory(tensor) not in self._run_of

    def is_written(self, tensor: Tensor) -> bool:
        """Whether any run has written a tensor in place."""
        return _memory(tensor) in self._written

    def depends(self, func: Any, given: Any) -> bool:
        """Whether what an operator returns and writes is no constant.

        Args:
            func: the operator.
            given: its arguments, (args, kwargs).
        """
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return True
        return not takes_no_values(func) and not all(map(self.is_constant, tensors_of(given)))

    def note(self, func: Any, given: Any, result: Any) -> None:
        """Note what an operator of this run returned and wrote.

        Args:
            func, given: as in `depends`, whose answer was yes.
            result: what it returned.
        """
        for tensor in (*tensors_of(result), *written_by(func, given)):
            if self._run_of.get(_memory(tensor)) != 0:
                self._mark(tensor, self._run)

    def note_written(self, func: Any, given: Any) -> None:
        """Note what an operator writes, of constants or not."""
        self._written |= {_memory(tensor) for tensor in written_by(func, given)}

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Every run is given these."""
        for tensor in tensors:
            self._mark(tensor, 0)

    def _mark(self, tensor: Tensor, run: int) -> None:
        memory = _memory(tensor)
        self._run_of[memory] = run
        self._alive[memory] = tensor  # no other tensor gets its memory


def takes_no_values(func: Any) -> bool:
    """Whether an operator reads shapes and dtypes of what it is given alone."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _NO_VALUES


def written_by(func: Any, given: Any) -> list[Tensor]:
    """The tensors that an operator writes in place.

    Args:
        func: the operator.
        given: its arguments, (args, kwargs).
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    args, kwargs = given
    found: list[Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's memory; of one without a storage, such as a sparse one, its own."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage
