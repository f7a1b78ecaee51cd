"""Where the samples of a batch are, checked by tracing the step with another number of samples.

place_samples   dimension 0 of every tensor, or where the user says
  │ traced with another number of samples (see `row_trace`)
  ▼
it runs: layers that read samples as a sequence, or by indices, are refused; what else relates samples is returned
it fails: with the samples of a microbatch, too? Then that error is the answer
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..values.containers import BatchNesting, flatten_batch, one_level, shared_texts
from ..values.sparse_tensors import refuse_sparse_tensors
from .batch_dims import (
    AUTO,
    SAMPLES,
    BatchDims,
    DifferentRows,
    place_samples,
    read_batch_dims,
    readings,
    tensors_by_name,
)
from .row_rules import LOOKUP, SEQUENCE, Finding
from .row_trace import RowTrace, RowTracer

_MOST_SUGGESTED = 12
"""Number of suggestions that are traced."""
Step = Callable[[nn.Module, Any], Any]


def find_batch_dims(
    model: nn.Module, step: Step, batch: Any, *, given: Any = AUTO, microbatches: int = 2, gradients: bool = True
) -> BatchDims:
    """The places of the samples in a batch. Arguments and errors as of `find_samples`."""
    return find_samples(model, step, batch, given=given, microbatches=microbatches, gradients=gradients)[0]


def find_samples(
    model: nn.Module, step: Step, batch: Any, *, given: Any = AUTO, microbatches: int = 2, gradients: bool = True
) -> tuple[BatchDims, RowTrace | None]:
    """The places of the samples in a batch, and the trace of the step, if it ran.

    Args:
        model, step: the user's; the step is traced on fake tensors, and the model does not change.
        batch: an example.
        given: the user's ``batch_dims``, or known `BatchDims` of some leaves.
        microbatches: number of parts into which the batch is cut.
        gradients: whether a backward follows.

    Raises:
        RequestError: ``given`` does not fit the batch, tensors have different numbers of rows, the step cannot run on
            fewer samples, or relates them as a sequence.
    """
    known = given if isinstance(given, BatchDims) else read_batch_dims(given, batch)
    leaves, nesting = flatten_batch(batch)
    refuse_sparse_tensors(model, nesting.plain(leaves))
    check = _Check(model, step, batch, known, microbatches, gradients)
    try:
        dims = place_samples(batch, known, microbatches)
    except DifferentRows as error:
        check.refuse_microbatches()
        raise RequestError(f"{error}; {check.advice(None)}") from None
    if microbatches == 1 or all(known.knows(name) for name in nesting.names):  # nothing is cut, or the user knows
        return dims, None if microbatches == 1 else check.tracer.trace(dims)
    return dims, check.traced(dims)


class _Check:
    def __init__(
        self, model: nn.Module, step: Step, batch: Any, known: BatchDims, microbatches: int, gradients: bool
    ) -> None:
        self.tracer = RowTracer(model, step, batch, gradients)
        self._model, self._step, self._batch = model, step, batch
        self._known, self._microbatches, self._gradients = known, microbatches, gradients
        leaves, self._nesting = flatten_batch(batch)
        self._shared_texts = shared_texts(leaves, self._nesting)
        self._tensors = tensors_by_name(leaves, self._nesting)

    def traced(self, dims: BatchDims) -> RowTrace | None:
        """The trace with these dimensions; None if the step cannot be traced.

        Raises:
            RequestError: the samples cannot be there.
        """
        found = self.tracer.trace(dims)
        if found.error is None:
            wrong = next((f for f in found.findings if f.kind in (SEQUENCE, LOOKUP)), None)
            if wrong is not None:
                raise RequestError(f"{_refusal(wrong)}; {self.advice(dims)}")
            return found
        if self.tracer.trace_with(dims, None).error is not None:  # it needs values: its capture has a better message
            self.refuse_microbatches()
            return None
        samples = self._samples(dims)
        rows = -(-samples // self._microbatches)
        cut = self.tracer.trace_with(dims, rows)
        if cut.error is None or rows == samples:  # it runs with some numbers of samples only
            return None
        advice = self._suggestion(dims)
        raise RequestError(
            f"{cut.reason} (with {rows} of {samples} samples, as in a microbatch): change that line so that it accepts "
            f"them, or the batch or the number of microbatches{self._shared_texts}"
            + (f"; if samples are elsewhere, give batch_dims=, such as batch_dims={advice}" if advice else "")
        )

    def refuse_microbatches(self) -> None:
        """Refuse a list of ready-made microbatches.

        Raises:
            RequestError: the step runs on an element of the batch, and not on the batch.
        """
        batch = self._batch
        if type(batch) not in (list, tuple) or len({flatten_batch(one)[1] for one in batch}) != 1:
            return
        whole = RowTracer(self._model, self._step, batch, self._gradients).trace_with(BatchDims(()), None)
        one = RowTracer(self._model, self._step, batch[0], self._gradients).trace_with(BatchDims(()), None)
        if whole.error is not None and one.error is None:
            raise RequestError(
                f"the batch is a list of {len(batch)} batches, and the step runs on one of them: give one whole batch, "
                "which panpipe cuts into microbatches; for ready-made microbatches concatenate their tensors, such as "
                "torch.cat([one['x'] for one in batch])"
            )

    def advice(self, dims: BatchDims | None) -> str:
        """How to go on where the samples are not in dimension 0."""
        suggested = self._suggestion(dims)
        if suggested:
            return (
                f"give batch_dims=, such as batch_dims={suggested}, with the dimension of the samples in each tensor, "
                "and None for what all microbatches share"
            )
        sizes = {name: tensor.shape[0] for name, tensor in self._tensors.items()}
        name, other = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        times, rest = divmod(sizes[name], max(sizes[other], 1))
        several = ""
        if not rest and 1 < sizes[other] < sizes[name]:
            several = (
                f"if {name} has {times} rows for each sample of {other}, give it in the shape ({sizes[other]}, "
                f"{times}, ...), and let the step flatten it; otherwise "
            )
        return (
            f"{several}give batch_dims= with the dimension of the samples in each tensor, and None for what all "
            "microbatches share; where one row holds a part of several samples, as in packed documents, nothing can be "
            "cut: give batches with a dimension of samples, or microbatches=1"
        )

    def _suggestion(self, dims: BatchDims | None) -> str:
        """Other dimensions, which cut most of the batch, with which the step runs and relates no samples but by weights
        of classes, as text; "" for none."""
        for number, other in enumerate(self._others(dims)):
            if number == _MOST_SUGGESTED:
                break
            found = self.tracer.trace(other)
            related = [finding for finding in found.findings if not finding.operator.startswith("nll_loss")]
            sizes = {n: t.numel() for n, t in self._tensors.items()}
            cut = sum(size for n, size in sizes.items() if other.by_name.get(n) is not None or other.in_list(n))
            if found.error is None and not related and 2 * cut >= sum(sizes.values()):
                return _dims_text(other, self._nesting, self._tensors)
        return ""

    def _others(self, dims: BatchDims | None) -> Iterator[BatchDims]:
        """Lists of samples; dimensions of equal size, those of most tensors first; all but one tensor."""
        yield from readings(self._batch, self._known)[0][1:]
        known = {name: dim for name, dim in self._known.leaves if name in self._tensors}
        sizes = [size for tensor in self._tensors.values() for size in dict.fromkeys(tensor.shape) if size > 1]
        seen: list[Any] = [] if dims is None else [{n: d for n, d in dims.leaves if n in self._tensors}]
        for size in sorted(dict.fromkeys(sizes), key=lambda size: -sizes.count(size)):
            for place in range(max(t.ndim for t in self._tensors.values())):
                other: dict[str, int | None] = {}
                for name, tensor in self._tensors.items():
                    order = [place, *range(tensor.ndim)]
                    free = (d for d in order if d < tensor.ndim and tensor.shape[d] == size)
                    other[name] = known[name] if name in known else next(free, None)
                if other not in seen and any(dim is not None for dim in other.values()):
                    seen.append(other)
                    yield BatchDims.of(other)
        if dims is not None:
            yield from (BatchDims.of({**dims.by_name, n: None}) for n in self._tensors if n not in known)

    def _samples(self, dims: BatchDims) -> int:
        """The number of samples of the batch."""
        sizes = [t.shape[d] for n, t in self._tensors.items() if (d := dims.by_name.get(n)) is not None]
        for one in dims.lists:
            inside = (name.removeprefix(f"{one}[") for name in self._nesting.names if name.startswith(f"{one}["))
            sizes.append(len({name.partition("]")[0] for name in inside}))
        return sizes[0]


def _refusal(finding: Finding) -> str:
    if finding.kind == SEQUENCE:
        return f"{finding} relates the entries of dimension 0 of the batch as a sequence, which cannot be cut"
    return f"{finding} reads rows of the batch that values of the batch name, which cannot be cut"


def _dims_text(dims: BatchDims, nesting: BatchNesting, tensors: Collection[str]) -> str:
    """Dimensions as in ``batch_dims``, ready to be pasted."""
    found: set[Any] = {dim for name, dim in dims.leaves if name in tensors} | ({SAMPLES} if dims.lists else set())
    if len(found) == 1:
        return repr(found.pop())
    plain = nesting.plain([dims.by_name.get(name) for name in nesting.names])
    return repr(_with_lists_named(plain, "batch", dims.lists))


def _with_lists_named(value: Any, name: str, lists: frozenset[str]) -> Any:
    """A nesting of dimensions in which lists of samples are replaced by ``"samples"``."""
    level = one_level(value, name)
    if name in lists or level is None:
        return SAMPLES if name in lists else value
    held, spec = level
    return pytree.tree_unflatten([_with_lists_named(part, place, lists) for place, part in held.items()], spec)
