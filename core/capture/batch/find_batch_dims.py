"""Where the samples of a batch are, checked by tracing the step on fake tensors with another number of samples.

place_samples   dimension 0 of every tensor, or where the user says
  │ traced with another number of samples (`RowTracer`)
  ▼
it runs: layers that read samples as a sequence, or by indices, are refused; what else relates samples is returned
it fails: with the samples of a microbatch, too? Then that error is the answer
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy
import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import RequestError
from ..graph.autograd_functions import without_checkpoints
from ..python.changes import Changes, assigned_buffers_written, isolated
from ..python.guards import Guards
from ..python.parameters import references_followed
from ..python.refusals import calls_refused
from ..values.containers import BatchNesting, flatten_batch, one_level, shared_texts
from ..values.fake_tensors import fake_of, fake_state
from ..values.raising_branches import value_without_error
from ..values.sparse_tensors import refuse_sparse_tensors
from ..values.user_lines import message_start, user_line
from .batch_dims import (
    AUTO,
    SAMPLES,
    BatchDims,
    DifferentRows,
    place_samples,
    read_batch_dims,
    readings,
    tensors_by_name,
    with_lists,
)
from .row_rules import LOOKUP, SEQUENCE, Finding, RowWatch

_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173)
_DIVISIBLE = 12
"""Multiple of the prime for a step that does not run with a prime number of samples, such as one that forms pairs."""


@frozen
class RowTrace:
    """The result of a trace.

    Args:
        error: that the step raised; None if it ran.
        findings: operators that relate samples.
        results: for every returned tensor, in order, the dimensions with the number of samples.
        written: names of the parameters and buffers that it wrote.
    """

    error: Exception | None
    findings: tuple[Finding, ...] = ()
    results: tuple[tuple[int, ...], ...] = ()
    written: frozenset[str] = field(factory=frozenset)

    @property
    def reason(self) -> str:
        """The message of its error, with the user's line."""
        text = next(iter(str(self.error).strip().splitlines()), "") or type(self.error).__name__
        return message_start(user_line(self.error)) + text


class _Values(TorchFunctionMode):
    """A mode in which ``numpy()`` of a fake tensor returns zeros, texts contain the number that ``item()`` returns,
    checks that raise an error pass, and a watch notes recurrent layers."""

    def __init__(self, watch: RowWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu") and isinstance(args[-1], bool):
            self._watch.note_recurrence(func.__name__, args[0], args[-1])
        if args and isinstance(args[0], FakeTensor):
            tensor = args[0]
            if func in (Tensor.numpy, Tensor.__array__):
                return numpy.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if func is Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), args[1])
            if func is Tensor.__bool__ and (found := value_without_error()) is not None:
                return found
        return func(*args, **(kwargs or {}))


class RowTracer:
    """Traces a step, or a function of model and batch, with other numbers of samples.

    Args:
        model, step: the user's; nothing of the model changes.
        batch: an example.
        gradients: whether a backward follows.
    """

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any, gradients: bool) -> None:
        self._model, self._step, self._batch, self._gradients = model, step, batch, gradients
        self._leaves, self._nesting = flatten_batch(batch)
        self._tensors = tensors_by_name(self._leaves, self._nesting)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers(), *(t for t in self._leaves if isinstance(t, Tensor))]
        self._device = torch.device(next((t.device.type for t in tensors if not t.is_meta), "cpu"))
        sizes = {size for tensor in tensors for size in tensor.shape if size}
        self._prime = next((p for p in _PRIMES if all(size % p for size in sizes)), _PRIMES[-1])
        self._guards = Guards(model, step)

    def trace(self, dims: BatchDims) -> RowTrace:
        """Run the step with a number of samples that has a prime factor which no other size has.

        Args:
            dims: where the samples are.
        """
        found = self.trace_with(dims, self._prime)
        return found if found.error is None else self.trace_with(dims, _DIVISIBLE * self._prime)

    def trace_with(self, dims: BatchDims, rows: int | None) -> RowTrace:
        """Run the step with a number of samples; None for the example's. If it fails after it needed a value, it runs
        again with every bool True."""
        found = self._run(dims, rows, False)
        return found if found.error is None else self._run(dims, rows, True)

    def _run(self, dims: BatchDims, rows: int | None, truth: bool) -> RowTrace:
        nesting, leaves = self._nesting, list(self._leaves)
        if dims.lists and rows is not None:
            count = rows
            taken = lambda held: [held[i % len(held)] for i in range(count)]  # noqa: E731
            leaves, nesting = with_lists(leaves, nesting, dims.lists, taken)
        fakes = [self._fake(leaf, dims.by_name.get(n), rows) for leaf, n in zip(leaves, nesting.names, strict=True)]
        given = [fake for fake in fakes if isinstance(fake, Tensor)]
        watch = RowWatch(self._prime, rows or self._prime, truth, given, self._holds)
        _, state = fake_state(self._model, self._mode, self._device, self._gradients)
        versions = {name: tensor._version for name, tensor in state.items()}
        error, results = None, list[Any]()
        with self._apart(state):
            try:
                batch = nesting.batch(fakes)
                with watch, _Values(watch):
                    results = [r for r in pytree.tree_leaves(self._step(self._model, batch)) if isinstance(r, Tensor)]
                watch.note_results(results)
            except Exception as raised:
                error = raised
        where = tuple(tuple(d for d, size in enumerate(r.shape) if size == rows) for r in results)
        written = frozenset(name for name, version in versions.items() if state[name]._version != version)
        return RowTrace(error, tuple(watch.findings.values()), where, written)

    @contextlib.contextmanager
    def _apart(self, state: dict[str, Tensor]) -> Any:
        """The context of a run: parameters and buffers are fake, and changes of Python objects are undone."""
        changes = Changes(self._guards, lambda value: True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(isolated(self._model, changes))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            stack.enter_context(_reparametrize_module(self._model, dict(state)))
            stack.enter_context(references_followed(self._model, self._guards))
            stack.enter_context(calls_refused(forward=not self._gradients))
            stack.enter_context(without_checkpoints())
            stack.enter_context(contextlib.suppress(Exception))  # capture refuses what is written
            stack.enter_context(assigned_buffers_written(self._model, set()))
            stack.enter_context(self._mode)
            yield

    def _fake(self, leaf: Any, dim: int | None, rows: int | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        if dim is not None and rows is not None:
            shape[dim] = rows
        return fake_of(leaf.detach(), self._mode, self._device, shape)

    def _holds(self, number: int) -> bool:
        """Whether an integer tensor of the batch holds a number, such as the label of positions that are ignored."""
        whole = (t for t in self._leaves if isinstance(t, Tensor) and t.dtype in (torch.int32, torch.int64))
        with _disable_current_modes():
            return any(not t.is_meta and bool((t == number).any()) for t in whole)


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
    check = _Check(model, step, batch, gradients, known=known, microbatches=microbatches)
    try:
        dims = place_samples(batch, known, microbatches)
    except DifferentRows as error:
        check.refuse_microbatches()
        raise RequestError(f"{error}; {check.advice(None)}") from None
    if microbatches == 1 or all(known.knows(name) for name in nesting.names):  # nothing is cut, or the user knows
        return dims, None if microbatches == 1 else check.trace(dims)
    return dims, check.traced(dims)


class _Check(RowTracer):
    """Places of the samples that the user does not give in ``known``, for this number of microbatches."""

    def __init__(self, *traced: Any, known: BatchDims, microbatches: int) -> None:
        super().__init__(*traced)
        self._known, self._microbatches = known, microbatches

    def traced(self, dims: BatchDims) -> RowTrace | None:
        """The trace with these dimensions; None if the step cannot be traced.

        Raises:
            RequestError: the samples cannot be there.
        """
        found = self.trace(dims)
        if found.error is None:
            wrong = next((f for f in found.findings if f.kind in (SEQUENCE, LOOKUP)), None)
            if wrong is not None:
                raise RequestError(f"{_refusal(wrong)}; {self.advice(dims)}")
            return found
        if self.trace_with(dims, None).error is not None:  # it needs values: its capture has a better message
            self.refuse_microbatches()
            return None
        samples = self._samples(dims)
        rows = -(-samples // self._microbatches)
        cut = self.trace_with(dims, rows)
        if cut.error is None or rows == samples:  # it runs with some numbers of samples only
            return None
        advice = self._suggestion(dims)
        raise RequestError(
            f"{cut.reason} (with {rows} of {samples} samples, as in a microbatch): change that line so that it accepts "
            f"them, or the batch or the number of microbatches{shared_texts(self._leaves, self._nesting)}"
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
            found = self.trace(other)
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
