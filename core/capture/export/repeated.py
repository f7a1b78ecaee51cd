"""Whether a step does the same when it runs again: what its Python keeps from run to run is lost in a captured graph.

A captured step has run its Python once. One that draws ``next(iterator)``, reads a clock, or counts its own calls would
compute something else the next time. No list of such sources is complete, so the step runs again, on fake tensors:

    run 1 ──▶ run 2                    the same operators with the same numbers?
                └─ no ──▶ run 3        as run 2: the first run only set something up
    counts of the step far on ──▶ run  a branch such as ``if self.calls > 100``
    a run whose ``item()`` returns another number ──▶ run    a branch such as ``if loss > 3 * mean(self.losses)``

Runs are compared by their operators, with shapes and numbers. What differs is refused with the user's line.
"""

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from ...errors import RequestError
from ..batch.row_rules import RowWatch
from ..graph.functions import without_checkpoints
from ..python.isolation import isolated
from ..python.reached import Reached
from ..values.containers import flatten_batch
from ..values.fakes import fake_of, fake_state
from ..values.placeholder_values import PlaceholderValues
from .kept_tensors import KeptTensors
from .recorded import READS_FILE, Ran, Recording, files_noted, first_difference

_FAR = (7, 1_000_000)
"""What is added to the numbers that a step counts with: past a few steps, and past most thresholds and periods."""
_LONGER = 1000
"""Entries that are added to a list that a step appends to."""
_NUMBER = 1.0
"""What ``item()`` returns in runs that are compared."""
_OTHERS = (1e-6, 1e6)
"""What it returns in a run before one: a step that keeps what it was may compare with it."""
_OTHER_NUMBERS = "after steps with other losses or other numbers of tensors"
_PRIME = 1_000_003
"""A size that no tensor has: `RowWatch` is here for the values that it gives alone."""


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
        self._changed: list[str] = []
        self._gave_number, self._read_kept = False, ""
        self._fakes = [fake_of(x.detach(), self._mode, device) if isinstance(x, Tensor) else x for x in leaves]
        given = [fake for fake in self._fakes if isinstance(fake, Tensor)]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._kept = KeptTensors([*given, *(t for name, t in self._state.items() if name in parameters)])

    def compare(self) -> None:
        """Refuse runs that differ."""
        with self._apart():
            start, first, once = self._reached, self._run(), self._now()
            second, twice = self._run(), self._now()
            self._changed = [p for one, other in ((once, twice), (start, once)) for p in _others(one, other)]
            self._refuse_read_kept()
            if first_difference(first, second) is not None:
                third = self._run()
                self._refuse_other(second, third, "when it runs again")
                second = third
            if (read := next((ran for ran in second if ran.what == READS_FILE), None)) is not None:
                raise _refusal(read, ["a file"], "once the file has changed")
            self._refuse_later(second, once, twice, "after more steps")
            for number in _OTHERS if self._gave_number else ():
                before = self._now()
                self._run(number)
                self._refuse_other(second, self._run(), _OTHER_NUMBERS)
                after = self._now()
                self._run(number)
                self._refuse_later(second, before, after, _OTHER_NUMBERS)

    def _refuse_later(self, known: list[Ran], before: Reached, after: Reached, when: str) -> None:
        """Refuse a step that differs once what it counts and collects, from one moment to another, has gone on."""
        numbers, sizes = _numbers(before), _sizes(before)
        counts = {p: n - numbers[p] for p, n in _numbers(after).items() if p in numbers and n != numbers[p]}
        grown = [(h, h[-1]) for h, items in after.sequences if h and sizes.get(id(h), len(items)) < len(items)]
        for far in _FAR if counts or grown else ():
            for place, by in counts.items():
                after.assign(place, after.number(place) + (far if by > 0 else -far))
            for held, last in grown:
                held.extend([last] * min(far, _LONGER))
            self._refuse_other(known, self._run(), when)

    def _refuse_other(self, known: list[Ran], other: list[Ran], when: str) -> None:
        self._refuse_read_kept()
        if (found := first_difference(known, other)) is not None:
            raise _refusal(found, self._changed, when)

    def _refuse_read_kept(self) -> None:
        if self._read_kept:
            what = f" (it changes '{self._changed[0]}')" if self._changed else ""
            raise RequestError(
                f"{self._read_kept}: the step reads a tensor here that an earlier step computed and Python kept{what}: "
                "captured, Python runs once; keep it in a buffer of the model"
            )

    def _now(self) -> Reached:
        return Reached.of(self._model, self._step)

    def _run(self, number: float = _NUMBER) -> list[Ran]:
        """Run the step, to its end or to what does not run on fake tensors.

        Args:
            number: what ``item()`` returns.
        """
        recording, watch = Recording(self._kept), _Values(number)
        placeholders = PlaceholderValues(number)
        self._kept.begin(self._model.buffers())
        with files_noted(recording.ran), suppress(Exception), self._mode, watch, placeholders, recording:
            self._step(self._model, self._nesting.batch(self._fakes))
        self._gave_number |= watch.gave_number or placeholders.gave_number
        self._read_kept = self._read_kept or recording.read_kept
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


class _Values(RowWatch):
    """Gives a step the values that fake tensors do not have, and judges nothing.

    Args:
        number: the value of every number.

    Attributes:
        gave_number: whether the step asked for one.
    """

    def __init__(self, number: float) -> None:
        super().__init__(_PRIME, _PRIME, truth=False, stops=False)
        self._number = number
        self.gave_number = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool:
            self.gave_number = True
            return self._number if args[0].is_floating_point() else int(self._number)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _judge(self, call: Any) -> None:
        """Rows are no matter here."""


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
