"""Which dimension of each tensor of a batch holds the samples, found by tracing with another number of them.

axes       sets of dimensions of one size, and of lists of that length, the likely ones first
  │ traced with another size: where the step fails, these dimensions cannot change together
  ▼
one that keeps samples apart (see `row_rules`): cutting it leaves the mean loss as it was
  │ else: the one that runs, where no other one that runs holds as many tensors and is as likely
  ▼
else a refusal, which asks for ``batch_dims``
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from ...errors import RequestError
from ..python.reads import Reads
from ..values.containers import flatten_batch, one_level
from ..values.sparse_tensors import refuse_sparse_tensors
from .batch_dims import AUTO, BatchDims, read_batch_dims, tensor_names
from .row_rules import LOOKUP, POSITIONAL
from .row_trace import RowTrace, RowTracer

MAX_TRACES = 40
"""Traces after which what is not found is asked for."""


@frozen
class Axis:
    """A set of dimensions that may hold the samples.

    Args:
        rows: their size.
        dims: name of a tensor → its dimension; tensors that have none are left out.
        lists: names of lists with an element for each sample.
        covered: how many tensors have samples.
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


def find_batch_dims(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    given: Any = AUTO,
    microbatches: int = 2,
    gradients: bool = True,
) -> BatchDims:
    """Find where the samples of a batch are.

    Args:
        model, step: the user's; the step is traced on fake tensors, and nothing of the model changes.
        batch: an example.
        given: what the user gives as ``batch_dims``; or `BatchDims` that are known of some leaves.
        microbatches: into how many it is cut.
        gradients: whether a backward follows.

    Raises:
        RequestError: what is given does not fit, or there is nothing to cut, or a doubt remains.
    """
    known = given if isinstance(given, BatchDims) else read_batch_dims(given, batch)
    leaves, nesting = flatten_batch(batch)
    if all(known.knows(name) for name in nesting.names):
        return known
    refuse_sparse_tensors(model, nesting.plain(leaves))
    kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    modes = tuple(module.training for module in model.modules())
    key = kinds, nesting, known, microbatches == 1, gradients, modes, hash(Reads(model, step).key)
    for of_model, of_step, other, found in _recent:
        if of_model() is model and of_step() is step and other == key:
            return found
    dims = _Search(RowTracer(model, step, batch, gradients), known, microbatches).found()
    with suppress(TypeError):  # a step of a class without weak references
        _recent.append((weakref.ref(model), weakref.ref(step), key, dims))
    return dims


_recent: deque[tuple[Any, Any, Any, BatchDims]] = deque(maxlen=16)
"""What was found last; a reference step asks for each batch again."""


class _Search:
    def __init__(self, tracer: RowTracer, known: BatchDims, microbatches: int) -> None:
        self._tracer, self._known, self._microbatches = tracer, known, microbatches
        self._tensors = tensor_names(tracer.leaves, tracer.nesting)
        self._lists = _lists_of_samples(tracer.nesting.plain(tracer.leaves), "batch")
        self._traces: dict[Axis, RowTrace] = {}
        self._count = 0

    def found(self) -> BatchDims:
        axes = self._axes()
        if not axes:
            raise RequestError("the batch holds no tensor with rows: give tensors of which a dimension is the batch")
        found = self._kept_apart(axes) or self._likeliest(axes)
        return self._dims(found)

    def _kept_apart(self, axes: Sequence[Axis]) -> Axis | None:
        """The first axis that keeps samples apart, or that does without tensors which have its size by chance."""
        for axis in axes:
            if self._keeps_apart(axis):
                return self._farthest(axis, axes)
            if axis.leading and self._tracer.fails(dict(axis.dims), axis.lists):
                if self._all_run_cut(axis):  # the step takes some sizes alone, such as divisors of a queue's length
                    return axis
                for other in filter(self._keeps_apart, _repaired(axis)):
                    return other
        for axis in axes:
            if axis.leading and self._trace(axis).has(LOOKUP):  # a table of as many rows as there are samples
                for other in filter(self._keeps_apart, _repaired(axis)):
                    return other
        return None

    def _farthest(self, found: Axis, axes: Sequence[Axis]) -> Axis:
        """Of tensors with other numbers of rows, which the step also keeps apart, those that the model computes with:
        a term of the loss that is of all samples, such as a penalty, reaches few operators."""
        others = (axis for axis in axes if found.leading and axis.leading and axis.rows != found.rows)
        known = self._tracer.trace
        return max([found, *filter(self._keeps_apart, others)], key=lambda a: known(dict(a.dims), a.lists).reach)

    def _running(self, axes: Sequence[Axis]) -> list[Axis]:
        """Axes that the step runs with: as they are, or without some tensors, or with groups of samples."""
        running = [axis for axis in axes if self._trace(axis).carries]
        if not running:
            running = [other for axis in axes for other in _repaired(axis) if self._trace(other).carries]
        if not running:
            groups = {axis: self._tracer.trace_groups(dict(axis.dims), axis.lists) for axis in axes if axis.leading}
            self._traces |= {axis: trace for axis, trace in groups.items() if trace.carries}
            running = [axis for axis in groups if self._traces[axis].runs]
        return running

    def _all_run_cut(self, axis: Axis) -> bool:
        """Whether an axis has all tensors, and the step runs with them as microbatches have them and not with fewer.

        Raises:
            RequestError: it also runs where some tensors are whole: they may have that size by chance.
        """
        rows = -(-axis.rows // self._microbatches)
        if axis.covered != len(self._tensors) or rows == axis.rows:
            return False
        cut = self._tracer.trace_with(dict(axis.dims), axis.lists, rows)
        if not cut.runs:
            return False
        for other in _repaired(axis):
            whole = dict(axis.dims).keys() - dict(other.dims).keys()
            if not dict(other.dims).keys() & cut.read:
                continue  # what it cuts is not read, so it says nothing
            if whole <= cut.read and self._tracer.trace_with(dict(other.dims), other.lists, rows).runs:
                raise RequestError(
                    f"what holds the samples may be {axis}, or {other}: with {rows} of {axis.rows} the step runs with "
                    f"either; {_ask(axis)}"
                )
        return True

    def _keeps_apart(self, axis: Axis) -> bool:
        return self._may_trace(axis) and self._tracer.keeps_apart(dict(axis.dims), axis.lists)

    def _trace(self, axis: Axis) -> RowTrace:
        if axis not in self._traces:
            self._traces[axis] = (
                self._tracer.trace(dict(axis.dims), axis.lists)
                if self._may_trace(axis)
                else RowTrace(0, RuntimeError(f"not traced: {MAX_TRACES} others were"))
            )
        return self._traces[axis]

    def _may_trace(self, axis: Axis) -> bool:
        """Whether an axis was traced already, or fewer than `MAX_TRACES` were; counts it."""
        known = self._tracer.known(dict(axis.dims), axis.lists) is not None
        self._count += not known
        return known or self._count <= MAX_TRACES

    def _dims(self, axis: Axis) -> BatchDims:
        """With what is not cut, by name; tensors that the step does not read are cut with the others."""
        trace, dims = self._traces.get(axis) or self._tracer.known(dict(axis.dims), axis.lists), dict(axis.dims)
        lists = BatchDims((), axis.lists)
        for name in self._tracer.nesting.names:
            tensor = self._tensors.get(name)
            unread = trace is not None and trace.runs and not axis.lists and name not in trace.read
            if tensor is not None and unread and not self._known.knows(name) and tensor.shape[0] == axis.rows:
                dims[name] = 0
        names = [name for name in self._tracer.nesting.names if not lists.in_list(name)]
        return BatchDims.of({name: dims.get(name) for name in names}, axis.lists)

    # Axes

    def _axes(self) -> list[Axis]:
        """All that sizes allow, the likely ones first: those along dimension 0, then those of more tensors."""
        known = {n: d for n, d in self._known.by_name.items() if d is not None and n in self._tensors}
        free = {n: t for n, t in self._tensors.items() if not self._known.knows(n)}
        sizes = {t.shape[known[n]] for n, t in self._tensors.items() if n in known}
        sizes |= {len(self._lists[name]) for name in self._known.lists if name in self._lists}
        if not sizes:
            sizes = {size for t in free.values() for size in t.shape} | {len(e) for e in self._lists.values()}
        found: dict[Axis, None] = {}
        for rows in sorted(sizes):
            lists = frozenset(name for name, elements in self._lists.items() if len(elements) == rows)
            for inside in dict.fromkeys((self._known.lists, self._known.lists | lists)):
                for place in range(max((t.ndim for t in free.values()), default=1)):
                    for pure in (True, False):
                        axis = self._axis(rows, place, pure, inside, known, free)
                        if axis.covered:
                            found.setdefault(axis)
        return sorted(found, key=lambda axis: (not axis.leading, -axis.covered, bool(axis.lists)))

    def _axis(
        self,
        rows: int,
        place: int,
        pure: bool,
        lists: frozenset[str],
        known: Mapping[str, int],
        free: Mapping[str, Tensor],
    ) -> Axis:
        """Of each tensor this dimension, if it has the size; or, unless all are alike, another one that has it."""
        inside = BatchDims((), lists)
        dims = dict(known)
        for name, tensor in free.items():
            if inside.in_list(name):
                continue
            order = [place] if pure else [place, *range(tensor.ndim)]
            dim = next((d for d in order if d < tensor.ndim and tensor.shape[d] == rows), None)
            if dim is not None:
                dims[name] = dim
        covered = len(dims) + sum(inside.in_list(name) for name in self._tracer.nesting.names)
        return Axis(rows, tuple(dims.items()), lists, covered)

    # Where no axis keeps samples apart

    def _likeliest(self, axes: Sequence[Axis]) -> Axis:
        running = self._running(axes)
        if self._microbatches == 1:  # nothing is cut
            return (running or axes)[0]
        if not running:
            return self._untraced(axes)
        best = running[0]
        trace = self._traces[best]
        lookup = next((f for f in trace.findings if f.kind == LOOKUP), None)
        if lookup is not None:
            raise RequestError(
                f"{lookup.line}{': ' if lookup.line else ''}{lookup.operator} reads rows of the batch that values of "
                f"the batch name, so {best} cannot be cut into microbatches; {_ask(best)}"
            )
        rivals = [axis for axis in running[1:] if axis.covered >= best.covered]
        if not rivals:
            return best
        found = {axis: set(self._traces[axis].findings) for axis in (best, *rivals)}
        common = set.intersection(*found.values())  # what all of them have decides nothing
        apart = [axis for axis, own in found.items() if not any(f.kind == POSITIONAL for f in own - common)]
        if len(apart) == 1:
            return apart[0]
        raise RequestError(
            f"what holds the samples may be {best}, or {rivals[0]}: the step runs with either; {_ask(best)}"
        )

    def _untraced(self, axes: Sequence[Axis]) -> Axis:
        """Where no axis could be traced: what Dynamo's capture says, or the one that sizes leave no doubt about."""
        best = axes[0]
        whole = self._tracer.trace_with({}, frozenset(), None)
        if whole.runs:  # the step itself runs, with this number of samples
            if self._traces[best].runs:  # and reads none of them
                return best
            for axis in axes:
                if axis.leading and self._all_run_cut(axis):
                    return axis
            raise RequestError(
                f"{self._traces[best].reason} (with {best} of another size than {best.rows}); {_ask(best)}"
            )
        captured = self._tracer.by_dynamo()
        if captured.trace_with({}, frozenset(), None).runs:
            self._tracer, self._traces, self._count = captured, {}, 0
            return self._kept_apart(axes) or self._likeliest(axes)
        shapes = {t.shape[0] for t in self._tensors.values()}
        rivals = [a for a in axes[1:] if a.covered >= best.covered]
        if best.leading and not rivals and len(shapes) == 1:
            return best
        raise RequestError(f"which dimensions hold the samples cannot be traced ({whole.reason}); {_ask(best)}")


def _ask(axis: Axis) -> str:
    names = [*dict(axis.dims), *axis.lists]
    key = names[0].removeprefix("batch")
    example = f"{{{key[1:-1]}: 0}}" if key.startswith("['") and key.count("[") == 1 else "0"
    return f"say which with batch_dims=, such as batch_dims={example}, with None for what all microbatches share"


def _repaired(axis: Axis) -> Iterator[Axis]:
    """Axes with one tensor less, then with two: what has that size by chance."""
    for count in (1, 2):
        if len(axis.dims) <= count:
            return
        for left in combinations(reversed(axis.dims), count):
            dims = tuple(one for one in axis.dims if one not in left)
            yield Axis(axis.rows, dims, axis.lists, axis.covered - count)


def _lists_of_samples(batch: Any, name: str) -> dict[str, Sequence[Any]]:
    """Lists whose elements are nested alike, with tensors of the same dtypes and numbers of dimensions."""
    if type(batch) in (list, tuple) and len(batch) > 1 and len({_kind(one) for one in batch}) == 1 and _kind(batch[0]):
        return {name: batch}
    level = one_level(batch, name)
    found: dict[str, Sequence[Any]] = {}
    for place, part in level[0].items() if level is not None else ():
        found |= _lists_of_samples(part, place)
    return found


def _kind(element: Any) -> Any:
    """What the elements of a list have in common, if they are samples; None without a tensor."""
    leaves, nesting = flatten_batch(element)
    tensors = [(leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return (nesting, tuple(tensors)) if any(isinstance(leaf, Tensor) for leaf in leaves) else None
