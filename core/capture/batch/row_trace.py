"""Traces a step on fake tensors with another number of samples."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ..graph.autograd_functions import without_checkpoints
from ..python.changes import Changes, assigned_buffers_written
from ..python.dynamo import PlainStep
from ..python.guards import Guards
from ..python.isolation import isolated
from ..python.references import references_followed
from ..python.refused_calls import calls_refused
from ..values.capture_errors import Refused, error_of_type
from ..values.containers import BatchNesting, flatten_batch, one_level
from ..values.fake_tensors import fake_of, fake_state
from ..values.placeholder_values import PlaceholderValues
from ..values.user_lines import message_start, user_line
from .dense_losses import dense_losses
from .row_rules import JOINT, TOTAL, Finding, RowWatch, TraceStopped

_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173)
_DIVISIBLE = 12
"""Multiple of the prime for a step that does not run with a prime number of samples, such as one that forms groups."""


@frozen
class RowTrace:
    """The result of a trace with another number of samples.

    Args:
        rows: number of samples.
        error: that the step raised; None if it ran.
        findings: operators that do not treat samples independently.
        read: names of the leaves that it read.
        results: for every returned tensor, in order, the dimensions with the number of samples.
        reach: number of operators with samples among their inputs.
    """

    rows: int
    error: Exception | TraceStopped | None
    findings: tuple[Finding, ...] = ()
    read: frozenset[str] = field(factory=frozenset)
    results: tuple[tuple[int, ...], ...] = ()
    reach: int = 0

    @property
    def runs(self) -> bool:
        """Whether the step ran."""
        return self.error is None

    @property
    def carries(self) -> bool:
        """Whether it ran, and samples reached operators."""
        return self.runs and self.reach > 0

    @property
    def independent(self) -> bool:
        """Whether it ran and treated samples independently, but for totals over all of them."""
        return self.carries and all(finding.kind == TOTAL for finding in self.findings)

    @property
    def relation(self) -> Finding | None:
        """What relates samples, if it ran, and nothing in it depends on their order; otherwise None."""
        joint = self.carries and all(finding.kind in (JOINT, TOTAL) for finding in self.findings)
        return self.findings[0] if joint and self.findings else None

    @property
    def refusal(self) -> str | None:
        """The reason why the step cannot be captured at all, with the user's line; None if it may be."""
        found = None if isinstance(self.error, TraceStopped) else error_of_type(Refused, self.error)
        return None if found is None else f"{user_line(self.error)}: {found}"

    @property
    def reason(self) -> str:
        """The message of its error, with the user's line."""
        text = next(iter(str(self.error).strip().splitlines()), "") or type(self.error).__name__
        return message_start(user_line(self.error)) + text


class RowTracer:
    """Traces a step, or a function of model and batch, with other numbers of samples.

    Args:
        model, step: the user's; nothing of the model changes.
        batch: an example; only shapes and dtypes matter.
        gradients: whether a backward follows.
        by_dynamo: whether Dynamo captures the step first, and its graph is traced: for a step whose Python does not run
            on fake tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[nn.Module, Any], Any],
        batch: Any,
        gradients: bool,
        by_dynamo: bool = False,
    ) -> None:
        self._model, self._step, self._batch, self._gradients = model, step, batch, gradients
        self._by_dynamo = by_dynamo
        self.leaves, self.nesting = flatten_batch(batch)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers(), *(t for t in self.leaves if isinstance(t, Tensor))]
        kinds = [tensor.device.type for tensor in tensors]
        self._device = torch.device(next((kind for kind in kinds if kind != "meta"), "cpu"))
        _, self._state = fake_state(model, self._mode, self._device, gradients)
        sizes = {size for tensor in tensors for size in tensor.shape if size}
        self._prime = next((p for p in _PRIMES if all(size % p for size in sizes)), _PRIMES[-1])
        self._guards = Guards(model, step)
        self._known: dict[Any, RowTrace] = {}

    def by_dynamo(self) -> "RowTracer":
        """A tracer of Dynamo's capture of the step."""
        return RowTracer(self._model, self._step, self._batch, self._gradients, by_dynamo=True)

    def trace(self, dims: Mapping[str, int | None], lists: frozenset[str] = frozenset()) -> RowTrace:
        """Run the step with a number of samples that is a prime which divides no other size.

        Args:
            dims: name of a leaf → its dimension of samples.
            lists: names of lists with an element for each sample.
        """
        known = self.known(dims, lists)
        return known or self._kept(dims, lists, self._run(dims, lists, self._prime))

    def is_independent(self, dims: Mapping[str, int | None], lists: frozenset[str] = frozenset()) -> bool:
        """Whether the step runs and treats samples independently; the trace ends at the first finding."""
        known = self.known(dims, lists)
        if known is not None:
            return known.independent
        found = self._run(dims, lists, self._prime, stops=True)
        return found is not None and self._kept(dims, lists, found).independent

    def known(self, dims: Mapping[str, int | None], lists: frozenset[str]) -> RowTrace | None:
        """An earlier trace that ran to its end."""
        return self._known.get(_key(dims, lists))

    def trace_groups(self, dims: Mapping[str, int | None], lists: frozenset[str] = frozenset()) -> RowTrace:
        """Trace with a multiple of the prime that has many divisors, for a step that forms groups of samples."""
        found = self._run(dims, lists, _DIVISIBLE * self._prime)
        assert found is not None
        return found

    def trace_with(self, dims: Mapping[str, int | None], lists: frozenset[str], rows: int | None) -> RowTrace:
        """Trace with a number of samples; None for the example's. The findings of such a trace have no meaning."""
        found = self._run(dims, lists, rows)
        assert found is not None
        return found

    def runs_with_multiples(self, dims: Mapping[str, int | None], times: Mapping[str, int]) -> bool:
        """Whether the step runs if some leaves have several rows for each sample.

        Args:
            dims: name of a leaf → its dimension of samples.
            times: name of a leaf → its number of rows for each sample, if not 1.
        """
        found = self._run(dims, frozenset(), self._prime, times=times)
        return found is not None and found.runs

    def _kept(self, dims: Mapping[str, int | None], lists: frozenset[str], found: RowTrace | None) -> RowTrace:
        assert found is not None
        self._known[_key(dims, lists)] = found
        return found

    def _run(
        self,
        dims: Mapping[str, int | None],
        lists: frozenset[str],
        rows: int | None,
        stops: bool = False,
        times: Mapping[str, int] = MappingProxyType({}),
    ) -> RowTrace | None:
        """Run the step; if it fails after it needed a value, run it again with every bool True. None if the run was
        stopped."""
        for truth in (False, True):
            watch = RowWatch(self._prime, rows or self._prime, truth, stops)
            found = self._watched(watch, dims, lists, rows, times)
            if isinstance(found.error, TraceStopped):
                return None
            if found.runs or not watch.asked:
                break
        return found

    def _watched(
        self,
        watch: RowWatch,
        dims: Mapping[str, int | None],
        lists: frozenset[str],
        rows: int | None,
        times: Mapping[str, int],
    ) -> RowTrace:
        nesting, leaves = self.nesting, list(self.leaves)
        if lists and rows is not None:
            leaves, nesting = with_lists(leaves, nesting, lists, lambda all_of: _cycled(all_of, rows))
        names = nesting.names
        sizes = [rows and rows * times.get(name, 1) for name in names]
        fakes = [self._fake(leaf, dims.get(name), size) for leaf, name, size in zip(leaves, names, sizes, strict=True)]
        watch.read_numbers([fake for fake in fakes if isinstance(fake, Tensor)])
        error: Exception | TraceStopped | None = None
        results: list[Any] = []
        with self._apart(), self._mode:
            try:
                run = self._captured(nesting, fakes) if self._by_dynamo else partial(self._step, self._model)
                batch = (nesting.plain if self._by_dynamo else nesting.batch)(fakes)
                with watch, PlaceholderValues():
                    results = pytree.tree_leaves(run(batch))
            except (Exception, TraceStopped) as raised:
                error = raised
        read = frozenset(name for name, fake in zip(names, fakes, strict=True) if id(fake) in watch.read)
        shapes = [tuple(r.shape) for r in results if isinstance(r, Tensor)]
        where = tuple(tuple(d for d, size in enumerate(shape) if size == rows) for shape in shapes)
        return RowTrace(rows or 0, error, tuple(watch.findings.values()), read, where, watch.reach)

    def _captured(self, nesting: BatchNesting, fakes: Sequence[Any]) -> Callable[[Any], Any]:
        """Dynamo's capture of the step. What Dynamo ignores, such as printing, does not matter here."""
        plain = PlainStep(self._model, self._step, nesting)
        return torch.export.export(plain, (nesting.plain(fakes),), strict=True).module()

    @contextlib.contextmanager
    def _apart(self) -> Any:
        """The context of a run: parameters and buffers are fake, and changes of Python objects are undone."""
        changes = Changes(self._guards, lambda value: True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(isolated(self._model, changes))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            stack.enter_context(_reparametrize_module(self._model, dict(self._state)))
            stack.enter_context(references_followed(self._model, self._guards))
            stack.enter_context(calls_refused())
            if not self._by_dynamo:  # Dynamo would trace these, too
                stack.enter_context(without_checkpoints())
                stack.enter_context(dense_losses())
                stack.enter_context(changes.of_attributes(self._model))
                stack.enter_context(assigned_buffers_written(self._model, set()))
            yield

    def _fake(self, leaf: Any, dim: int | None, rows: int | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = list(leaf.shape)
        if dim is not None and rows is not None:
            shape[dim] = rows
        return fake_of(leaf.detach(), self._mode, self._device, shape)


def _key(dims: Mapping[str, int | None], lists: frozenset[str]) -> Any:
    return tuple((name, dim) for name, dim in dims.items() if dim is not None), lists


def with_lists(
    leaves: Sequence[Any], nesting: BatchNesting, lists: frozenset[str], take: Callable[[list[Any]], list[Any]]
) -> tuple[list[Any], BatchNesting]:
    """A batch with other elements in some of its lists.

    Args:
        leaves, nesting: the batch.
        lists: names of the lists.
        take: the present elements of a list → its new elements.
    """
    return flatten_batch(_relisted(nesting.batch(leaves), "batch", lists, take))


def _relisted(value: Any, name: str, lists: frozenset[str], take: Callable[[list[Any]], list[Any]]) -> Any:
    if isinstance(value, Tensor):  # a batch may have a tensor in place of the example's list
        return value
    if name in lists:
        return type(value)(take(list(value)))
    if not any(other.startswith(name) for other in lists):
        return value
    leaves, nesting = flatten_batch(value)
    if nesting.node is not None and nesting.node.object is not None:
        fields = nesting.plain(leaves)
        parts = {key: _relisted(_field(value, key), f"{name}[{key!r}]", lists, take) for key in fields}
        return nesting.node.object.filled(parts)
    level = one_level(value, name)
    if level is None:
        return value
    held, spec = level
    return pytree.tree_unflatten([_relisted(part, place, lists, take) for place, part in held.items()], spec)


def _field(value: Any, key: str) -> Any:
    return value[key] if isinstance(value, Mapping) else getattr(value, key)


def _cycled(elements: list[Any], count: int) -> list[Any]:
    return [elements[i % len(elements)] for i in range(count)]
