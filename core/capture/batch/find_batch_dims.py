"""Finds which dimension of each tensor of a batch holds the samples, by tracing with another number of samples.

axes       sets of dimensions of one size, and of lists of that length, the most likely ones first
  │ traced with another size: if the step fails, these dimensions cannot change together
  ▼
an axis with independent samples (see `row_rules`): cutting it does not change the mean loss
  │ otherwise: an axis with which the step runs, if no other such axis has as many tensors
  ▼
otherwise a refusal that asks for ``batch_dims``
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ...wording import first_of
from ..python.guards import Guards
from ..values.containers import flatten_batch
from ..values.sparse_tensors import refuse_sparse_tensors
from .axes import Axis, AxisFinder, lists_of_samples, with_fewer_tensors
from .batch_dims import AUTO, BatchDims, read_batch_dims, tensors_by_name
from .row_rules import GROUPED, LOOKUP, POSITIONAL, SEQUENCE
from .row_trace import RowTrace, RowTracer

MAX_TRACES = 40
"""Largest number of traces; after that, the user is asked."""


def find_batch_dims(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    given: Any = AUTO,
    microbatches: int = 2,
    gradients: bool = True,
) -> BatchDims:
    """Find the places of the samples in a batch.

    Args:
        model, step: the user's; the step is traced on fake tensors, and the model does not change.
        batch: an example.
        given: the user's ``batch_dims``, or known `BatchDims` of some leaves.
        microbatches: number of parts into which the batch is cut.
        gradients: whether a backward follows.

    Raises:
        RequestError: ``given`` does not fit, the batch has no tensor with rows, or the places are ambiguous.
    """
    known = given if isinstance(given, BatchDims) else read_batch_dims(given, batch)
    leaves, nesting = flatten_batch(batch)
    if all(known.knows(name) for name in nesting.names):
        return known
    refuse_sparse_tensors(model, nesting.plain(leaves))
    kinds = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    modes = tuple(module.training for module in model.modules())
    key = kinds, nesting, known, microbatches == 1, gradients, modes, hash(Guards(model, step).key)
    for of_model, of_step, other, found in _recent:
        if of_model() is model and of_step() is step and other == key:
            return found
    dims = _Search(RowTracer(model, step, batch, gradients), known, microbatches).found()
    with suppress(TypeError):  # a step of a class without weak references
        _recent.append((weakref.ref(model), weakref.ref(step), key, dims))
    return dims


_recent: deque[tuple[Any, Any, Any, BatchDims]] = deque(maxlen=16)
"""Recent results, because a reference step looks for each batch's dimensions again."""


class _Search:
    def __init__(self, tracer: RowTracer, known: BatchDims, microbatches: int) -> None:
        self._tracer, self._known, self._microbatches = tracer, known, microbatches
        self._tensors = tensors_by_name(tracer.leaves, tracer.nesting)
        lists = lists_of_samples(tracer.nesting.plain(tracer.leaves), "batch")
        axes = AxisFinder(self._tensors, lists, known, tracer.nesting.names).axes()
        self._axes = [axis for axis in axes if self._is_first(axis)]
        self._traces: dict[Axis, RowTrace] = {}
        self._count = 0

    def found(self) -> BatchDims:
        axes = self._axes
        if not axes:
            raise RequestError("the batch holds no tensor with rows: give tensors with a batch dimension")
        found = self._independent(axes) or self._likeliest(axes)
        return self._dims(found)

    def _independent(self, axes: Sequence[Axis]) -> Axis | None:
        """The first axis with independent samples, if need be without tensors that have its size by chance.

        Raises:
            RequestError: tensors without which the samples are independent may belong to the samples, too.
        """
        leading = [axis for axis in axes if axis.leading]
        for axis in leading:
            if self._is_independent(axis):
                if self._trace(axis).relation is not None:
                    self._refuse_related(axis)
                return self._with_most_operators(axis, axes)
            if not self._trace(axis).runs and self._all_run_cut(axis):
                return axis  # the step supports some sizes only, such as divisors of a queue's length
        found = next(filter(self._is_independent, self._others(axes, leading)), None)
        if found is not None:
            for axis in leading:
                if set(found.dims) < set(axis.dims) and self._trace(axis).relation is not None:
                    self._refuse_related(axis)
        return found

    def _is_first(self, axis: Axis) -> bool:
        """Whether samples are along dimension 0 of every tensor whose dimension is not given: no other is chosen."""
        return all(dim == 0 or self._known.knows(name) for name, dim in axis.dims)

    def _others(self, axes: Sequence[Axis], leading: Sequence[Axis]) -> Iterator[Axis]:
        """Other axes, those of most tensors first: along dimensions that are given, or of fewer tensors."""
        fewer = [other for axis in axes for other in with_fewer_tensors(axis) if self._is_known(other)]
        others = sorted([*axes, *fewer], key=lambda axis: (-axis.covered, not axis.leading))
        yield from (axis for axis in dict.fromkeys(others) if axis not in leading)

    def _is_known(self, axis: Axis) -> bool:
        """Whether an axis has all the places that are known."""
        known = {(name, dim) for name, dim in self._known.leaves if dim is not None and name in self._tensors}
        return known <= set(axis.dims)

    def _refuse_related(self, axis: Axis) -> None:
        """Refuse an axis whose samples are related if those of fewer tensors are not.

        A contrastive loss relates them, or a total over them.

        Raises:
            RequestError: the other tensors may be shared, or may belong to the samples.
        """
        if self._microbatches == 1:
            return
        fewer = sorted(filter(self._is_known, with_fewer_tensors(axis)), key=lambda other: -self._elements(other))
        found, finding = next(filter(self._is_unrelated, fewer), None), self._trace(axis).relation
        if found is not None and finding is not None:
            shared = first_of([name for name, _ in axis.dims if name not in dict(found.dims)], 8)
            given = {name: dict(found.dims).get(name) for name, _ in axis.dims}
            raise RequestError(
                f"{finding} relates all rows of the batch to each "
                f"other, and the step runs whether {shared} is cut into microbatches or shared by all of them; give "
                f"batch_dims={_dict_text(dict(axis.dims))} to cut it, or batch_dims={_dict_text(given)} to share it"
            )

    def _elements(self, axis: Axis) -> int:
        return sum(self._tensors[name].numel() for name, _ in axis.dims)

    def _is_unrelated(self, axis: Axis) -> bool:
        return self._is_independent(axis) and not self._trace(axis).findings

    def _with_most_operators(self, found: Axis, axes: Sequence[Axis]) -> Axis:
        """Among axes of other sizes with independent samples, the one whose samples reach the most operators: a term of
        the loss over other rows, such as a penalty, reaches few."""
        others = (axis for axis in axes if found.leading and axis.leading and axis.rows != found.rows)
        known = self._tracer.trace
        return max([found, *filter(self._is_independent, others)], key=lambda a: known(dict(a.dims), a.lists).reach)

    def _running(self, axes: Sequence[Axis]) -> list[Axis]:
        """Axes with which the step runs; if there are none, without some tensors, or with groups of samples."""
        running = [axis for axis in axes if self._trace(axis).carries]
        if not running:
            running = [other for axis in axes for other in with_fewer_tensors(axis) if self._trace(other).carries]
        if not running:
            groups = {axis: self._tracer.trace_groups(dict(axis.dims), axis.lists) for axis in axes if axis.leading}
            self._traces |= {axis: trace for axis, trace in groups.items() if trace.carries}
            running = [axis for axis in groups if self._traces[axis].runs]
        return running

    def _all_run_cut(self, axis: Axis) -> bool:
        """Whether an axis has all tensors, and the step runs with the rows of a microbatch of them, and not of fewer
        tensors.

        Raises:
            RequestError: it also runs with some tensors uncut: they may have that size by chance.
        """
        rows = -(-axis.rows // self._microbatches)
        if axis.covered != len(self._tensors) or rows == axis.rows:
            return False
        cut = self._tracer.trace_with(dict(axis.dims), axis.lists, rows)
        if not cut.runs:
            return False
        for other in with_fewer_tensors(axis):
            whole = dict(axis.dims).keys() - dict(other.dims).keys()
            if not dict(other.dims).keys() & cut.read:
                continue  # the step does not read the tensors that it cuts
            if whole <= cut.read and self._tracer.trace_with(dict(other.dims), other.lists, rows).runs:
                raise RequestError(
                    f"the samples may be along {axis}, or along {other}: with {rows} of {axis.rows} the step runs with "
                    f"either; {_ask(axis)}"
                )
        return True

    def _is_independent(self, axis: Axis) -> bool:
        return self._may_trace(axis) and self._tracer.is_independent(dict(axis.dims), axis.lists)

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
        """The dimensions by name, None for leaves that are not cut; tensors that the step does not read are cut."""
        trace, dims = self._traces.get(axis) or self._tracer.known(dict(axis.dims), axis.lists), dict(axis.dims)
        lists = BatchDims((), axis.lists)
        for name in self._tracer.nesting.names:
            tensor = self._tensors.get(name)
            unread = trace is not None and trace.runs and not axis.lists and name not in trace.read
            if tensor is not None and unread and not self._known.knows(name) and tensor.shape[0] == axis.rows:
                dims[name] = 0
        names = [name for name in self._tracer.nesting.names if not lists.in_list(name)]
        return BatchDims.of({name: dims.get(name) for name in names}, axis.lists)

    # Without an axis of independent samples

    def _likeliest(self, axes: Sequence[Axis]) -> Axis:
        running = self._running(axes)
        if self._microbatches == 1:  # nothing is cut
            return (running or axes)[0]
        if not running:
            return self._untraced(axes)
        best = running[0]
        trace = self._traces[best]
        # Sums by the labels of samples may be by the graphs of nodes, if another tensor has a row for each sum.
        wrong = (LOOKUP,) if best.covered == len(self._tensors) else (LOOKUP, GROUPED)
        lookup = next((f for f in trace.findings if f.kind in wrong), None)
        if lookup is not None:
            raise RequestError(
                f"{lookup} reads rows of the batch that values of "
                f"the batch name, so {best} cannot be cut into microbatches; {_ask(best)}"
            )
        rivals = [axis for axis in running[1:] if axis.covered >= best.covered]
        if not rivals:
            self._refuse_sequence(best)
            return best
        found = {axis: set(self._traces[axis].findings) for axis in (best, *rivals)}
        common = set.intersection(*found.values())  # findings of all axes do not distinguish them
        apart = [axis for axis, own in found.items() if not any(f.kind in (POSITIONAL, SEQUENCE) for f in own - common)]
        if len(apart) == 1:
            return apart[0]
        raise RequestError(
            f"the samples may be along {best}, or along {rivals[0]}: the step runs with either; {_ask(best)}"
        )

    def _refuse_sequence(self, axis: Axis) -> None:
        """Refuse the only axis if it is a sequence, such as one sample without a batch, or packed samples."""
        finding = next((f for f in self._traces[axis].findings if f.kind == SEQUENCE), None)
        if finding is not None:
            raise RequestError(
                f"{finding} treats {axis} as a sequence, which "
                "cannot be cut into microbatches: give batches with a dimension of samples, or microbatches=1; "
                f"{_ask(axis)}"
            )

    def _untraced(self, axes: Sequence[Axis]) -> Axis:
        """If no axis could be traced: the result of tracing Dynamo's capture, or the only axis that the sizes allow."""
        best = axes[0]
        whole = self._tracer.trace_with({}, frozenset(), None)
        if whole.runs:  # the step itself runs, with this number of samples
            if self._traces[best].runs:  # and does not read them
                return best
            for axis in axes:
                if axis.leading and self._all_run_cut(axis):
                    return axis
            self._refuse_several_rows(axes)
            self._refuse_fewer_samples(best)
            raise RequestError(
                f"{self._traces[best].reason} (with {best} of another size than {best.rows}); {_ask(best)}"
            )
        if whole.refusal is not None:
            raise RequestError(whole.refusal)
        captured = self._tracer.by_dynamo()
        if captured.trace_with({}, frozenset(), None).runs:
            self._tracer, self._traces, self._count = captured, {}, 0
            return self._independent(axes) or self._likeliest(axes)
        shapes = {t.shape[0] for t in self._tensors.values()}
        rivals = [a for a in axes[1:] if a.covered >= best.covered]
        if best.leading and not rivals and len(shapes) == 1:
            return best
        raise RequestError(f"which dimensions hold the samples cannot be traced ({whole.reason}); {_ask(best)}")

    def _refuse_fewer_samples(self, axis: Axis) -> None:
        """Refuse a step that raises an error with the samples of a microbatch, too.

        Raises:
            RequestError: it does, and dimensions that are given would not help.
        """
        rows = -(-axis.rows // self._microbatches)
        if axis.leading and axis.covered == len(self._tensors) and rows < axis.rows:
            cut = self._tracer.trace_with(dict(axis.dims), axis.lists, rows)
            if not cut.runs:
                raise RequestError(
                    f"{cut.reason} (with {rows} of {axis.rows} samples of {axis}, as in a microbatch): change that "
                    "line so that it accepts them, or the batch or the number of microbatches"
                )

    def _refuse_several_rows(self, axes: Sequence[Axis]) -> None:
        """Refuse tensors with several rows for each sample in one dimension, such as both views of each image.

        Raises:
            RequestError: the step runs with another number of samples if these tensors have that many rows for each.
        """
        for axis in sorted((one for one in axes if one.leading and not one.lists), key=lambda one: one.rows):
            others = {name: t.shape[0] for name, t in self._tensors.items() if name not in dict(axis.dims)}
            times = {name: size // axis.rows for name, size in others.items() if size > axis.rows > 1}
            times = {name: count for name, count in times.items() if others[name] == count * axis.rows}
            if times and self._tracer.runs_with_multiples({**dict(axis.dims), **dict.fromkeys(times, 0)}, times):
                name, count = next(iter(times.items()))
                raise RequestError(
                    f"{name} has {count} rows for each of the {axis.rows} samples of {axis}, in one dimension, which "
                    f"batch_dims= cannot describe: give it with the samples in dimension 0 and the {count} rows of "
                    f"each in dimension 1, of shape {(axis.rows, count, *self._tensors[name].shape[1:])}, and have the "
                    "step flatten these dimensions in the order that it reads"
                )


def _dict_text(dims: Mapping[str, int | None]) -> str:
    """Dimensions as in ``batch_dims``: by key for a batch that is a dict, otherwise by the names of its leaves."""
    keys = [name.removeprefix("batch") for name in dims]
    flat = all(key.startswith("['") and key.count("[") == 1 for key in keys)
    parts = [f"{key[1:-1] if flat else name}: {dim}" for key, (name, dim) in zip(keys, dims.items(), strict=True)]
    return "{" + ", ".join(parts) + "}"


def _ask(axis: Axis) -> str:
    keys = [name.removeprefix("batch") for name in (*dict(axis.dims), *axis.lists)]
    flat = not axis.lists and all(key.startswith("['") and key.count("[") == 1 for key in keys)
    example = _dict_text(dict(axis.dims[:8])) if flat and keys else "0"
    return f"give batch_dims=, such as batch_dims={example}, with None for what all microbatches share"
