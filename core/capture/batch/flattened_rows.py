"""Where rows are in dimensions that also contain others, such as samples and positions after ``flatten``.

A flattened dimension of samples and positions has the positions of one sample next to each other if the samples were
the outer dimension, and those of all samples at one position otherwise. An operator that pairs the two orders relates
different samples, although the sizes agree.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .row_operators import BY_INDEX, LOSSES

_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"}
"""Return the same elements in the same order, in another shape."""

_OTHER_ORDERS = {
    "repeat", "tile", "cat", "stack", "set_", "resize_", "as_strided", "index", "_unsafe_index", "index_put",
    "index_put_", "_index_put_impl_", *BY_INDEX,
}  # fmt: skip
"""May return rows in another order."""


class FlattenedRows:
    """Follows tensors with one dimension of rows.

    Args:
        prime: divides the sizes of dimensions with rows, and no other size.
    """

    def __init__(self, prime: int) -> None:
        self._prime = prime
        self._inner: Any = WeakIdKeyDictionary()

    def note_call(self, func: Any, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
        """Note the results of an operator.

        Returns:
            Whether it pairs rows in different orders.
        """
        if name not in _RESHAPES and not len(self._inner):
            return False  # no dimension is flattened
        carrying = [tensor for tensor in given if self._dims(tensor)]
        orders = [self._order(tensor) for tensor in carrying]
        pairs = torch.Tag.pointwise in func.tags or name in LOSSES
        sizes = {tensor.shape[self._dims(tensor)[0]] for tensor in carrying}
        known = {order for order in orders if order is not None}
        if pairs and len(sizes) == 1 and len(known) > 1:
            return True
        if len(known) == 1 and None not in orders and name not in _OTHER_ORDERS:
            for tensor in made:
                self._follow(name, carrying[0], tensor, *known)
        return False

    def _follow(self, name: str, given: Tensor, made: Tensor, order: int) -> None:
        dims = self._dims(made)
        if len(dims) != 1 or made.shape[dims[0]] == self._prime:
            return
        (old,), (new,) = self._dims(given), dims
        if name in _RESHAPES:
            stride, inner = order * prod(given.shape[old + 1 :]), prod(made.shape[new + 1 :])
            if inner and stride % inner == 0:
                self._inner[made] = stride // inner
        elif given.shape[old] == made.shape[new]:
            self._inner[made] = order

    def _order(self, tensor: Tensor) -> int | None:
        """Number of elements of one row that are next to each other in the dimension of rows; None if unknown."""
        dims = self._dims(tensor)
        if len(dims) != 1:
            return None
        followed: int | None = self._inner.get(tensor)
        return 1 if tensor.shape[dims[0]] == self._prime else followed

    def _dims(self, tensor: Tensor) -> list[int]:
        return [d for d, size in enumerate(tensor.shape) if size and size % self._prime == 0]
