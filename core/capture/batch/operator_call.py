"""A call of an operator of ATen in a trace."""

from typing import Any

from attrs import frozen
from torch import Tensor

from ..graph.nodes import arguments_by_name


@frozen
class OperatorCall:
    """A call of an operator: its name, arguments, input tensors and result tensors."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    given: list[Tensor]
    made: list[Tensor]

    def argument(self, *names: str) -> Any:
        """The argument with the first of these names that the operator has; None if it has none of them."""
        given = arguments_by_name(self.func, self.args, self.kwargs)
        return next((given[name] for name in names if name in given), None)

    def check_rows(self, dim: int) -> None:
        """Raise the error of torch's kernels for ``index_add`` and the like, which fake tensors do not raise.

        Args:
            dim: of the table, whose places are given as indices.

        Raises:
            RuntimeError: the source has not one row of the table's shape for each index.
        """
        table, index, source = self.args[0], self.args[2], self.args[3]
        if isinstance(source, Tensor) and source.ndim == table.ndim > 0:
            rows = [*table.shape[:dim], index.numel(), *table.shape[dim + 1 :]]
            if list(source.shape) != rows:
                raise RuntimeError(f"rows of shape {tuple(source.shape)} do not fit a table of {tuple(table.shape)}")
