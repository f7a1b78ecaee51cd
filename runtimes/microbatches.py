"""Cuts a batch into microbatches; refuses reuse of a batch that a step writes in place, since it writes into copies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..core.capture.batch.batch_dims import BatchDims, place_samples, read_batch_dims, with_lists
from ..core.capture.regions.breaks import StepFunction
from ..core.capture.values.containers import BatchNesting, flatten_batch
from ..core.capture.values.sparse_tensors import refuse_if_not_strided
from ..core.errors import PanpipeError, RequestError, WorkerError
from ..core.wording import first_of, shape_text


@frozen(slots=False, cache_hash=True)
class Shape:
    """The shape of a microbatch, for which programs are specialised.

    Args:
        leaves: shape and dtype of every tensor in the batch, and the value of everything else.
        samples: number of samples of a microbatch of this shape.
    """

    leaves: tuple[Any, ...]
    nesting: BatchNesting
    dims: BatchDims
    samples: int

    def __str__(self) -> str:
        shapes = (leaf[0] for leaf in self.leaves if isinstance(leaf, tuple))
        return ", ".join(map(shape_text, shapes))

    @cached_property
    def named(self) -> dict[str, Any]:
        """Name of a leaf → its shape and dtype, or its value."""
        return dict(zip(self.nesting.names, self.leaves, strict=True))

    def difference(self, other: "Shape") -> str | None:
        """The first difference of another shape from this one, the example's, as text; numbers of rows are ignored."""
        mine, theirs = self.named, other.named
        both = sorted(name for name in mine if name in theirs and not self.dims.in_list(name))
        for name in both:
            if self._beyond_rows(name, mine[name]) != self._beyond_rows(name, theirs[name]):
                found, example = _leaf_text(theirs[name]), _leaf_text(mine[name])
                if isinstance(theirs[name], tuple) and isinstance(mine[name], tuple):
                    return f"{name} is {found} in a microbatch, and {example} in the example's"
                return f"{name} is {found}, and {example} in the example"
        for names, others, text in ((mine, theirs, "is missing"), (theirs, mine, "is new")):
            missing = next((n for n in names if n not in others and not self.dims.in_list(n)), None)
            if missing is not None:
                known, found = first_of(list(mine), 8), first_of(list(theirs), 8)
                return f"{missing} {text}: the example has {known}, and this batch {found}"
        return None

    def other_value(self, other: "Shape") -> tuple[str, Any, Any] | None:
        """The first value other than a tensor that another shape has in place of this one's.

        Returns:
            The leaf's name, the other shape's value, and this one's.
        """
        mine = self.named
        for name, value in other.named.items():
            known = mine.get(name, value)
            if not isinstance(value, tuple) and not isinstance(known, tuple) and value != known:
                return name, value, known
        return None

    def _beyond_rows(self, name: str, leaf: Any) -> Any:
        dim = self.dims.by_name.get(name)
        if dim is None or not isinstance(leaf, tuple):
            return leaf
        return (*leaf[0][:dim], None, *leaf[0][dim + 1 :]), leaf[1]


@frozen
class Microbatch:
    """One microbatch.

    Args:
        leaves: the batch's leaves, flattened; those with rows have this microbatch's rows.
        weight: its share of the batch's samples; over a batch they sum to 1.
        shape: its shape; one object for all microbatches of a batch with this shape.
    """

    leaves: tuple[Any, ...]
    weight: float
    samples: int
    shape: Shape

    @property
    def batch(self) -> Any:
        """The microbatch, nested as the user's batches."""
        return self.shape.nesting.batch(self.leaves)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for every leaf, such as ``batch['x']``."""
        return _names(self.shape.nesting)


class BatchCutter:
    """Cuts the batches of a pipeline.

    Args:
        microbatches: how many a batch is cut into; fewer if it has fewer samples.
    """

    def __init__(self, example: Shape, microbatches: int) -> None:
        self._example, self._microbatches = example, microbatches

    def cut(self, batch: Any, function: StepFunction | None = None) -> list[Microbatch]:
        """Cut a batch; samples of leaves that the example does not have are in dimension 0.

        Args:
            function: the function that reads it, if not a step with a backward.

        Raises:
            RequestError: it cannot be cut.
        """
        leaves, nesting = flatten_batch(batch)
        for name, leaf in zip(_names(nesting), leaves, strict=True):
            refuse_if_not_strided(name, leaf)
            self._check_dtype(name, leaf)
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise RequestError(
                    f"{name} is on the meta device ({_leaf_text(_shape_and_dtype(leaf))}), which holds no values: give "
                    "a tensor with values, such as one on the CPU"
                )
            if isinstance(leaf, Tensor) and leaf.requires_grad and function is None:  # no stage sends it back
                raise RequestError(
                    f"{name} requires a gradient, which a pipeline does not compute for a batch: detach it, or, if it "
                    "is to be trained, make what computes it a part of the model"
                )
        return split_batch(batch, self._microbatches, self._dims_of(batch, nesting), fewer=True)

    def _check_dtype(self, name: str, leaf: Any) -> None:
        """Refuse a dtype of another kind than the example's: the captured operators would fail on it."""
        known = self._example.named.get(name)
        if not isinstance(known, tuple):
            return
        if not isinstance(leaf, Tensor):
            raise RequestError(
                f"{name} is {leaf!r:.40}, and {_leaf_text(known)} in the example's microbatches: give a tensor"
            )
        if _dtype_kind(leaf.dtype) != _dtype_kind(known[1]):
            raise RequestError(
                f"{name} is {_leaf_text(_shape_and_dtype(leaf))}, and {_leaf_text(known)} in the example's "
                f"microbatches: convert it with .to({known[1]})"
            )

    def _dims_of(self, batch: Any, nesting: BatchNesting) -> BatchDims:
        known = self._example.dims
        if all(known.knows(name) for name in _names(nesting)):
            return known
        try:
            return place_samples(batch, known, self._microbatches)
        except RequestError as error:
            unnamed = set(nesting.names) <= {"batch"}  # one value, or an empty container
            text = f"is {batch!r:.40}" if unnamed else f"has {first_of(list(nesting.names), 8)}"
            known_names = first_of(list(self._example.named), 8)
            raise RequestError(f"the example has {known_names}, and this batch {text}: {error}") from error


def microbatch_sizes(samples: int, microbatches: int) -> list[int]:
    """The samples of each microbatch: they differ by at most one, and larger ones are first.

    There is one microbatch for each sample if there are fewer samples than microbatches.
    """
    count = min(samples, microbatches)
    return [samples // count + (number < samples % count) for number in range(count)] if count else []


def split_batch(batch: Any, microbatches: int, dims: BatchDims | Any = 0, *, fewer: bool = False) -> list[Microbatch]:
    """Cut a batch into microbatches whose sizes differ by at most one sample.

    Args:
        batch: any nesting of tensors (see `flatten_batch`).
        dims: the dimensions that hold the samples; or the user's ``batch_dims=`` (see `read_batch_dims`).
        fewer: if there are fewer samples than microbatches, whether to return one microbatch for each sample.

    Returns:
        The microbatches, larger ones first.

    Raises:
        RequestError: fewer samples than microbatches, no sample, or tensors with different numbers of samples.
    """
    leaves, nesting = flatten_batch(batch)
    # Programs are captured for one layout, and a slice such as ``ids[:, :-1]`` has another one for each length.
    leaves = [
        leaf.contiguous() if isinstance(leaf, Tensor) and leaf.layout is torch.strided else leaf for leaf in leaves
    ]
    if not isinstance(dims, BatchDims):
        dims = read_batch_dims(dims, batch)
    samples = _samples(leaves, nesting, dims)
    if samples < microbatches and not fewer:
        raise RequestError(
            f"the batch has {samples} samples for {microbatches} microbatches: a microbatch needs at least one; "
            f"use at most {samples} microbatches or a larger batch"
        )
    counts = microbatch_sizes(samples, microbatches)
    larger = samples % len(counts)
    found: list[Microbatch] = []
    shape = None
    for m, (leaves_m, nesting_m) in enumerate(_cut(leaves, nesting, dims, counts)):
        if m in (0, larger):
            shape = Shape(tuple(map(_shape_and_dtype, leaves_m)), nesting_m, dims, counts[m])
        elif dims.lists:  # samples in a list may have different shapes
            other = Shape(tuple(map(_shape_and_dtype, leaves_m)), nesting_m, dims, counts[m])
            shape = shape if shape == other else other
        assert shape is not None
        found.append(Microbatch(tuple(leaves_m), counts[m] / samples, counts[m], shape))
    return found


def _cut(
    leaves: list[Any], nesting: BatchNesting, dims: BatchDims, counts: list[int]
) -> Iterator[tuple[list[Any], BatchNesting]]:
    """The leaves and the nesting of microbatches with these numbers of samples."""
    start = 0
    for count in counts:
        part, nested, end = list(leaves), nesting, start + count
        if dims.lists:
            part, nested = with_lists(leaves, nesting, dims.lists, lambda all_of, a=start, b=end: all_of[a:b])  # type: ignore[misc]
        for place, dim in enumerate(_dims_of_leaves(nested, dims)):
            if dim is not None:
                rows = part[place].narrow(dim, start, count)
                part[place] = rows if dim == 0 else rows.contiguous()
        yield part, nested
        start = end


@lru_cache(maxsize=256)
def _names(nesting: BatchNesting) -> tuple[str, ...]:
    return nesting.names


@lru_cache(maxsize=256)
def _dims_of_leaves(nesting: BatchNesting, dims: BatchDims) -> tuple[int | None, ...]:
    """The dimension of every leaf that holds samples."""
    return tuple(dims.by_name.get(name) for name in _names(nesting))


def _samples(leaves: list[Any], nesting: BatchNesting, dims: BatchDims) -> int:
    """The number of samples, the same in all tensors and lists."""
    found: dict[str, tuple[int, str]] = {}
    for name, leaf, dim in zip(_names(nesting), leaves, _dims_of_leaves(nesting, dims), strict=True):
        if dim is not None:
            if not isinstance(leaf, Tensor) or leaf.ndim <= dim:
                what = shape_text(leaf.shape) if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise RequestError(
                    f"{name} is {what}, and dimension {dim} of it holds the samples in the example: give a tensor with "
                    "a row for each sample"
                )
            found[name] = leaf.shape[dim], f"{name} has shape {shape_text(leaf.shape)}"
    if dims.lists:
        with_lists(leaves, nesting, dims.lists, _counted(found))
    if not found:
        raise RequestError(
            "the batch holds no tensor with rows: give tensors with a batch dimension, and name it with batch_dims="
        )
    first, *others = found.values()
    other = next((other for other in others if other[0] != first[0]), None)
    if other is not None:
        raise RequestError(
            f"{first[1]}, which is {first[0]} samples, and {other[1]}, which is {other[0]}: give all tensors with a "
            "row for each sample the same number of rows"
        )
    if first[0] == 0:
        raise RequestError("the batch has 0 samples: a step needs at least one; leave empty batches out")
    return first[0]


def _counted(found: dict[str, tuple[int, str]]) -> Callable[[list[Any]], list[Any]]:
    def count(elements: list[Any]) -> list[Any]:
        found[f"list {len(found)}"] = len(elements), f"a list of samples has {len(elements)} elements"
        return elements

    return count


def _dtype_kind(dtype: torch.dtype) -> Any:
    """The kind of a dtype, as operators distinguish them: each floating-point type, and integers of any size."""
    return dtype if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool else int


def _shape_and_dtype(leaf: Any) -> Any:
    """The shape and dtype of a tensor; any other leaf itself."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _leaf_text(leaf: Any) -> str:
    if not isinstance(leaf, tuple):
        return repr(leaf)
    return f"{shape_text(leaf[0])} {str(leaf[1]).removeprefix('torch.')}"


class WrittenBatches:
    """The tensors of batches that steps have written.

    One process would change the user's tensor: another leaf of the batch that shares its memory would change with it,
    and the next step with the same batch would read the changed one. Both are refused.

    Args:
        written: name of a leaf that the step writes in place → the user's line.
    """

    def __init__(self, written: Mapping[str, str]) -> None:
        self._written = written
        self._given: Any = WeakIdKeyDictionary()

    def add(self, batch: Any) -> None:
        """Record that a step runs on a batch.

        Raises:
            RequestError: it shares memory between a written tensor and another one, or an earlier step wrote it.
        """
        if not self._written:
            return
        leaves, nesting = flatten_batch(batch)
        tensors = {n: x for n, x in zip(nesting.names, leaves, strict=True) if isinstance(x, Tensor) and not x.is_meta}
        for name, line in self._written.items():
            if name not in tensors:
                continue
            tensor, where = tensors[name], tensors[name].untyped_storage().data_ptr()
            for other, held in tensors.items():
                if other != name and held.untyped_storage().data_ptr() == where:
                    raise RequestError(
                        f"{line}: the step writes into {name} in place, whose memory is also that of {other}: a "
                        "pipeline writes into a copy of each microbatch; clone the tensor in the step before it is "
                        "written"
                    )
            if self._given.get(tensor) == tensor._version:
                raise RequestError(
                    f"{line}: the step writes into {name} in place, and an earlier step had the same tensor: in one "
                    "process it would have changed, and a pipeline writes into a copy; clone the tensor in the step "
                    "before it is written"
                )
            self._given[tensor] = tensor._version


@contextmanager
def naming_difference(example: Shape, pieces: Sequence[Microbatch]) -> Iterator[None]:
    """A context that adds to the failure of an operator in what a batch differs from the example.

    Failures that panpipe raises on purpose, and those of a rank that was lost, have other causes.

    Args:
        example: the shape of the example's largest microbatch.
    """
    try:
        yield
    except Exception as failure:
        stopped = isinstance(failure, WorkerError) and not failure.lost
        other = next(filter(None, (example.difference(piece.shape) for piece in pieces)), None)
        if other is not None and stopped:
            failure.args = (f"{failure}; {other}", *failure.args[1:])
        elif other is not None and not isinstance(failure, PanpipeError):
            failure.add_note(other)
        raise
