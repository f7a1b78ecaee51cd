"""Candidates for the dimensions that hold the samples: sets of dimensions of equal size, and lists of that length."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from attrs import frozen
from torch import Tensor

from ..values.containers import flatten_batch, one_level
from .batch_dims import BatchDims


@frozen
class Axis:
    """A set of dimensions that may hold the samples.

    Args:
        rows: their size.
        dims: name of a tensor → its dimension; without tensors that have none.
        lists: names of lists with an element for each sample.
        covered: number of tensors with samples.
    """

    rows: int
    dims: tuple[tuple[str, int], ...]
    lists: frozenset[str]
    covered: int

    @property
    def leading(self) -> bool:
        """Whether samples are always along dimension 0, as in most batches."""
        return all(dim == 0 for _, dim in self.dims)

    def __str__(self) -> str:
        parts = [f"dimension {dim} of {name}" for name, dim in self.dims] + [f"the elements of {n}" for n in self.lists]
        return ", ".join(parts)


@frozen
class AxisFinder:
    """Finds the axes of a batch.

    Args:
        tensors: of the batch, with dimensions, by name.
        lists: lists whose elements may be samples, by name.
        known: places that are known already.
        names: of all leaves of the batch.
    """

    tensors: Mapping[str, Tensor]
    lists: Mapping[str, Sequence[Any]]
    known: BatchDims
    names: Sequence[str]

    def axes(self) -> list[Axis]:
        """All axes that the sizes allow, the most likely first: those along dimension 0, then those of more tensors."""
        known = {n: d for n, d in self.known.by_name.items() if d is not None and n in self.tensors}
        free = {n: t for n, t in self.tensors.items() if not self.known.knows(n)}
        sizes = {t.shape[known[n]] for n, t in self.tensors.items() if n in known}
        sizes |= {len(self.lists[name]) for name in self.known.lists if name in self.lists}
        if not sizes:
            sizes = {size for t in free.values() for size in t.shape} | {len(e) for e in self.lists.values()}
        found: dict[Axis, None] = {}
        for rows in sorted(sizes):
            lists = frozenset(name for name, elements in self.lists.items() if len(elements) == rows)
            for inside in dict.fromkeys((self.known.lists, self.known.lists | lists)):
                for place in range(max((t.ndim for t in free.values()), default=1)):
                    for at_place_only in (True, False):
                        axis = self._axis(rows, place, at_place_only, inside, known, free)
                        if axis.covered:
                            found.setdefault(axis)
        return sorted(found, key=lambda axis: (not axis.leading, -axis.covered, bool(axis.lists)))

    def _axis(
        self,
        rows: int,
        place: int,
        at_place_only: bool,
        lists: frozenset[str],
        known: Mapping[str, int],
        free: Mapping[str, Tensor],
    ) -> Axis:
        """The axis of one dimension of each tensor with a size.

        Args:
            rows: the size.
            place: the preferred dimension.
            at_place_only: whether tensors in which another dimension has the size are left out.
            lists: names of the lists whose elements are samples.
            known: name of a tensor → its known dimension.
            free: the tensors whose dimension is not known, by name.
        """
        inside = BatchDims((), lists)
        dims = dict(known)
        for name, tensor in free.items():
            if inside.in_list(name):
                continue
            order = [place] if at_place_only else [place, *range(tensor.ndim)]
            dim = next((d for d in order if d < tensor.ndim and tensor.shape[d] == rows), None)
            if dim is not None:
                dims[name] = dim
        covered = len(dims) + sum(inside.in_list(name) for name in self.names)
        return Axis(rows, tuple(dims.items()), lists, covered)


def with_fewer_tensors(axis: Axis) -> Iterator[Axis]:
    """The axis without one tensor, then without two or three, which may have that size by chance."""
    for count in (1, 2, 3):
        if len(axis.dims) <= count:
            return
        for left in combinations(reversed(axis.dims), count):
            dims = tuple(one for one in axis.dims if one not in left)
            yield Axis(axis.rows, dims, axis.lists, axis.covered - count)


def lists_of_samples(batch: Any, name: str) -> dict[str, Sequence[Any]]:
    """Lists whose elements are nested alike, with tensors of the same dtypes and numbers of dimensions."""
    if type(batch) in (list, tuple) and len(batch) > 1 and len({_kind(one) for one in batch}) == 1 and _kind(batch[0]):
        return {name: batch}
    level = one_level(batch, name)
    found: dict[str, Sequence[Any]] = {}
    for place, part in level[0].items() if level is not None else ():
        found |= lists_of_samples(part, place)
    return found


def _kind(element: Any) -> Any:
    """The common structure of a list's elements, if they are samples; None without a tensor."""
    leaves, nesting = flatten_batch(element)
    tensors = [(leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return (nesting, tuple(tensors)) if any(isinstance(leaf, Tensor) for leaf in leaves) else None
