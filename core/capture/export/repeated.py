"""Whether a step does the same when it runs again: what its Python keeps from run to run is lost in a captured graph.

A captured step has run its Python once. One that draws ``next(iterator)``, reads a clock, or counts its own calls would
compute something else the next time. No list of such sources is complete, so the step runs again, on fake tensors:

    run 1 ──▶ run 2                    the same operators with the same numbers?
                └─ no ──▶ run 3        as run 2: the first run only set something up
    counts of the step far on ──▶ run  a branch such as ``if self.calls > 100``

Runs are compared by their operators, with shapes and numbers. What differs is refused with the user's line.
"""

import builtins
import functools
import io
import os
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import RequestError
from ..batch.row_rules import RowWatch
from ..graph.functions import without_checkpoints
from ..python.isolation import isolated
from ..python.reached import Reached, is_users
from ..values.containers import flatten_batch
from ..values.fakes import fake_of, fake_state
from ..values.placeholder_values import PlaceholderValues
from ..values.user_lines import is_user_code

_FAR = (7, 1_000_000)
"""What is added to the numbers that a step counts with: past a few steps, and past most thresholds and periods."""
_LONGER = 1000
"""Entries that are added to a list that a step appends to."""
_READS_FILE = "reads a file"
_PRIME = 1_000_003
"""A size that no tensor has: `RowWatch` is here for the values that it gives alone."""


@frozen
class Ran:
    """One operator of a run.

    Args:
        what: its name, with the shapes and numbers given to it.
        line: of the user's.
    """

    what: Hashable
    line: str


def refuse_unrepeatable(model: nn.Module, step: Any, batch: Any, device: torch.device, gradients: bool) -> None:
    """Refuse a step that does something else when it runs again; what is known to do the same does not run.

    Args:
        model, step: the user's; nothing of the model changes.
        batch: one microbatch; shapes and dtypes matter, and values of what is no tensor.
        device: where the step will run.
        gradients: whether a backward follows.

    Raises:
        RequestError: with the line at which two runs differ, and what the step changes.
    """
    leaves, nesting = flatten_batch(batch)
    reached = Reached.of(model, step)
    values = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
    key = nesting, values, tuple(reached.values.items()), gradients
    if any(of_model() is model and of_step() is step and other == key for of_model, of_step, other in _known):
        return
    _Runs(model, step, batch, device, gradients, reached).compare()
    with suppress(TypeError):  # a step of a class without weak references
        _known.append((weakref.ref(model), weakref.ref(step), key))


_known: deque[tuple[Any, Any, Hashable]] = deque(maxlen=16)


class _Runs:
    """Runs of a step on fake tensors, each with what the one before left in Python."""

    def __init__(
        self, model: nn.Module, step: Any, batch: Any, device: torch.device, gradients: bool, reached: Reached
    ) -> None:
        self._model, self._step, self._gradients, self._reached = model, step, gradients, reached
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        leaves, self._nesting = flatten_batch(batch)
        _, self._state = fake_state(model, self._mode, device, gradients)
        self._fakes = [fake_of(x.detach(), self._mode, device) if isinstance(x, Tensor) else x for x in leaves]

    def compare(self) -> None:
        """Refuse runs that differ."""
        with self._apart():
            start, first, once = self._reached, self._run(), self._now()
            second, twice = self._run(), self._now()
            before, sizes = _numbers(once), _sizes(once)
            counts = {p: n - before[p] for p, n in _numbers(twice).items() if p in before and n != before[p]}
            grown = [held for held, items in twice.sequences if sizes.get(id(held), len(items)) < len(items)]
            changed = [p for one, other in ((once, twice), (start, once)) for p in _others(one, other)]
            if first_difference(first, second) is not None:
                third = self._run()
                if (found := first_difference(second, third)) is not None:
                    raise _refusal(found, changed, "when it runs again")
                second = third
            if (read := next((ran for ran in second if ran.what == _READS_FILE), None)) is not None:
                raise _refusal(read, ["a file"], "once the file has changed")
            for far in _FAR if counts or grown else ():
                for place, by in counts.items():
                    twice.assign(place, twice.number(place) + (far if by > 0 else -far))
                for held in grown:
                    held.extend([held[-1]] * min(far, _LONGER))
                if (found := first_difference(second, self._run())) is not None:
                    raise _refusal(found, changed, "after more steps")

    def _now(self) -> Reached:
        return Reached.of(self._model, self._step)

    def _run(self) -> list[Ran]:
        """Run the step, to its end or to what does not run on fake tensors."""
        recording, watch = _Recording(), _Values(_PRIME, _PRIME, truth=False, stops=False)
        with _files_noted(recording.ran), suppress(Exception), self._mode, watch, PlaceholderValues(), recording:
            self._step(self._model, self._nesting.batch(self._fakes))
        return recording.ran

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Within, parameters and buffers are fake; what the step leaves in Python is taken back."""
        failure: RequestError | None = None
        with ExitStack() as stack:
            stack.enter_context(isolated(self._model, self._reached))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            stack.enter_context(_reparametrize_module(self._model, dict(self._state)))
            stack.enter_context(without_checkpoints())
            try:
                yield
            except RequestError as error:  # `isolated` lets none through
                failure = error
        if failure is not None:
            raise failure


class _Recording(TorchDispatchMode):
    """Records the operators that run within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Ran] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tuple(map(_comparable, pytree.tree_leaves((args, kwargs))))
        self.ran.append(Ran((str(func), given), _line(sys._getframe(1))))
        return func(*args, **kwargs)


class _Values(RowWatch):
    """Gives a step the values that fake tensors do not have, and judges nothing."""

    def _judge(self, call: Any) -> None:
        """Rows are no matter here."""


_is_user_code = functools.cache(is_user_code)


def _comparable(leaf: Any) -> Hashable:
    """What two leaves have in common that mean the same; a tensor that is no fake one has values."""
    if isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, _digest(leaf)
    return repr(leaf) if isinstance(leaf, int | float | complex | str | type(None)) else type(leaf).__name__


def _digest(tensor: Tensor) -> int:
    with torch.utils._python_dispatch._disable_current_modes(), suppress(Exception):
        return crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return 0


def _line(frame: Any) -> str:
    while frame is not None and not _is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def _files_noted(ran: list[Ran]) -> Iterator[None]:
    """Within, files that the user's code opens to read are noted."""
    original = open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and _passes_on(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and is_users(frame.f_code.co_filename) and not set(mode) & set("wax+"):
            ran.append(Ran(_READS_FILE, _line(frame)))
        return original(file, mode, *args, **kwargs)

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield


def _passes_on(file: str) -> bool:
    """Whether code opens files for its callers: Python's own, and what loads tensors and arrays."""
    return (file.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in file) or file.endswith(_LOADERS)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LOADERS = tuple(os.path.join(*parts) for parts in (("torch", "serialization.py"), ("numpy", "lib", "_npyio_impl.py")))


def first_difference(one: list[Ran], other: list[Ran]) -> Ran | None:
    """The first operator of a run that the other one does not have in its place; None where they are alike."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.what != theirs.what:
            return theirs
    longer = max(one, other, key=len)
    return None if len(one) == len(other) else longer[min(len(one), len(other))]


def _numbers(reached: Reached) -> dict[str, Any]:
    """Place → the number that was there, of those that can be set."""
    return {place: reached.values[place][1] for place in reached.owners}  # type: ignore[index]


def _sizes(reached: Reached) -> dict[int, int]:
    """Identity of a list → the length that it had."""
    return {id(held): len(items) for held, items in reached.sequences}


def _others(one: Reached, other: Reached) -> Iterator[str]:
    """Places that have another value later; tensors come and go."""
    for place, value in other.values.items():
        then = one.values.get(place, value)
        if then != value and not (isinstance(value, tuple) and value[0] == "a tensor"):
            yield place


def _refusal(found: Ran, changed: Sequence[str], when: str) -> RequestError:
    cause = f"it changes '{changed[0]}'" if changed else "it reads an iterator, a clock or another state"
    if changed == ["a file"]:
        cause = "it reads a file"
    return RequestError(
        f"{found.line or 'the step'}: the step computes something else here {when} ({cause}): captured, Python runs "
        "once; give it with the batch as a tensor, make it a buffer of the model, or change it between steps"
    )
