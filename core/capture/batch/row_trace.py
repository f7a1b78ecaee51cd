"""Traces a step on fake tensors with another number of samples."""

import contextlib
from collections.abc import Callable
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

from ..graph.autograd_functions import without_checkpoints
from ..python.changes import Changes, assigned_buffers_written, isolated
from ..python.guards import Guards
from ..python.references import references_followed
from ..python.refusals import calls_refused
from ..values.containers import flatten_batch
from ..values.fake_tensors import fake_of, fake_state
from ..values.raising_branches import value_without_error
from ..values.user_lines import message_start, user_line
from .batch_dims import BatchDims, with_lists
from .row_rules import Finding, RowWatch

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
        self._model, self._step, self._gradients = model, step, gradients
        self._leaves, self._nesting = flatten_batch(batch)
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
