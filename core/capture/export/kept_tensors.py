"""Tensors that one run of a step computes and a later run reads: Python keeps them, and a captured graph does not.

What is computed from neither the batch nor a parameter, such as a table of positions that the first call sets up, is
the same in every run and may be kept; so may the model's buffers.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

_NO_VALUES = ("empty", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operators whose results have nothing of the values that are given to them."""


class KeptTensors:
    """Which run computed what.

    Args:
        given: the batch's tensors and the parameters, which every run is given.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self._run_of: Any = WeakIdKeyDictionary()
        for tensor in given:
            self._run_of[tensor] = 0
        self._run = 0
        self._buffers: set[int] = set()

    def begin(self, buffers: Iterable[Tensor]) -> None:
        """Begin a run with these buffers."""
        self._run += 1
        self._buffers = set(map(id, buffers))

    def read(self, given: Any) -> bool:
        """Whether a tensor among what an operator is given was computed by an earlier run, and is no buffer."""
        return any(
            0 < self._run_of.get(tensor, 0) < self._run and id(tensor) not in self._buffers
            for tensor in _tensors(given)
        )

    def note(self, func: Any, given: Any, result: Any) -> None:
        """Note what an operator of this run returned."""
        name = func._schema.name.partition("::")[2]
        if name not in _NO_VALUES and any(tensor in self._run_of for tensor in _tensors(given)):
            for tensor in _tensors(result):
                if self._run_of.get(tensor) != 0:
                    self._run_of[tensor] = self._run


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
