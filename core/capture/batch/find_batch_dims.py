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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ..python.reads import Reads
from ..values.containers import flatten_batch
from ..values.sparse_tensors import refuse_sparse_tensors
from .axes import Axis, AxisFinder, lists_of_samples, with_fewer_tensors
from .batch_dims import AUTO, BatchDims, read_batch_dims, tensor_names
from .row_rules import LOOKUP, POSITIONAL
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
    key = kinds, nesting, known, microbatches == 1, gradients, modes, hash(Reads(model, step).key)
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
        self._tensors = tensor_names(tracer.leaves, tracer.nesting)
        lists = lists_of_samples(tracer.nesting.plain(tracer.leaves), "batch")
        self._axes = AxisFinder(self._tensors, lists, known, tracer.nesting.names).axes()
        self._traces: dict[Axis, RowTrace] = {}
        self._count = 0

    def found(self) -> BatchDims:
        axes = self._axes
        if not axes:
            raise RequestError("the batch holds no tensor with rows: give tensors with a batch dimension")
        found = self._independent(axes) or self._likeliest(axes)
        return self._dims(found)

    def _independent(self, axes: Sequence[Axis]) -> Axis | None:
        """The first axis with independent samples, if need be without tensors that have its size by chance."""
        for axis in axes:
            if self._is_independent(axis):
                return self._with_most_operators(axis, axes)
            if axis.leading and self._tracer.fails(dict(axis.dims), axis.lists):
                if self._all_run_cut(axis):  # the step supports some sizes only, such as divisors of a queue's length
                    return axis
                for other in filter(self._is_independent, with_fewer_tensors(axis)):
                    return other
        for axis in axes:
            if axis.leading and self._trace(axis).has(LOOKUP):  # a table with as many rows as there are samples
                for other in filter(self._is_independent, with_fewer_tensors(axis)):
                    return other
        return None

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
        common = set.intersection(*found.values())  # findings of all axes do not distinguish them
        apart = [axis for axis, own in found.items() if not any(f.kind == POSITIONAL for f in own - common)]
        if len(apart) == 1:
            return apart[0]
        raise RequestError(
            f"the samples may be along {best}, or along {rivals[0]}: the step runs with either; {_ask(best)}"
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


def _ask(axis: Axis) -> str:
    names = [*dict(axis.dims), *axis.lists]
    key = names[0].removeprefix("batch")
    example = f"{{{key[1:-1]}: 0}}" if key.startswith("['") and key.count("[") == 1 else "0"
    return f"give batch_dims=, such as batch_dims={example}, with None for what all microbatches share"
