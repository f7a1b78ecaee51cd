"""Whether a step computes the same when it runs again: a captured graph does not keep Python state between runs.

The Python of a captured step runs once. A step that draws ``next(iterator)``, reads a clock, or counts its own calls
would compute something else the next time. No list of such sources is complete, so the step runs again on fake tensors:

    run 1 ──▶ run 2                    the same operators with the same numbers?
                └─ no ──▶ run 3        equal to run 2: the first run only set something up
    counts of the step increased ──▶ run    a branch such as ``if self.calls > 100``
    its counts followed          ──▶ runs   both sides of ``if self.calls % 50 == 0``       (kept_number_runs.py)
    a run whose ``item()`` returns another number ──▶ run    a branch such as ``if loss > 3 * mean(self.losses)``
    runs whose ``item()`` returns other numbers   ──▶        ``len(f"{loss.item()}")``, if only texts need a value

Runs are compared by their operators, with shapes and numbers. A difference is refused with the user's line. Values that
the first run sets up are checked in `set_up_values`.
"""

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import define, field
from torch import nn

from ...errors import RequestError
from ..python.foreign_gradients import check_foreign_gradients
from ..python.pending_refusals import PendingRefusal
from ..python.reachable.reach import reach
from ..python.reached import Reached
from .kept_number_runs import follow_kept
from .run_record import RecordedOperator, cause_in, first_difference, read_kept_refusal, refusal_of, refuse_outside
from .set_up_values import refuse_other_set_up
from .trial_runs import NUMBER, Leaves, TrialRuns, leaves_of

_FAR = (7, 1_000_000)
"""Amounts added to the step's counts: more than a few steps, and more than most thresholds and periods."""
_LONGER = 1000
"""Number of entries added to a list to which the step appends."""
_OTHERS = (1e-6, 1e6)
"""Results of ``item()`` in the run before a compared run, because a step may keep the number and compare with it."""
_IN_TEXTS = (123456.789, math.nan)
"""Results of ``item()`` in compared runs of a step that writes values into texts and needs them for nothing else."""
MAX_RUNS = 34 + len(_IN_TEXTS)
"""Largest number of trial runs of a first capture: 3 at first, one for each of `_FAR`, 3 and one for each of `_FAR` for
each of `_OTHERS`, 4 for values that it sets up, 3 and 2 for each of `MAX_SIDES` for numbers that it keeps, and one for
each of `_IN_TEXTS`; a later shape has at most 17 more. `MAX_OPERATORS` limits each."""
_OTHER_NUMBERS = "after steps with other losses or other numbers of tensors"


def refuse_unrepeatable(
    model: nn.Module,
    step: Any,
    batch: Any,
    device: torch.device,
    gradients: bool,
    pending: Sequence[PendingRefusal] = (),
    texts: bool = False,
) -> None:
    """Refuse a step that computes something else when it runs again; a step that passed before does not run again.

    Args:
        model, step: the user's; the model does not change.
        batch: one microbatch; shapes, dtypes, and values that are not tensors matter.
        device: on which the step will run.
        gradients: whether a backward follows.
        pending: values that the step assigns and reads, and may only set up, such as a table of positions; if it does
            more, the first one's refusal is raised.
        texts: whether the step writes values into texts, and needs values for nothing else.

    Raises:
        RequestError: two runs differ; the message has the line, and a value that the step changes.
    """
    leaves, nesting = leaves_of(batch)
    reached = reach(model, step)
    values = tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | complex | str | bytes))
    key = nesting, values, tuple(reached.values.items()), gradients
    known = [one for one in _known if one.model() is model and one.step() is step]
    judged = next((one for one in known if one.key == key), None)
    if judged is not None and (leaves in judged.batches or not (judged.sets_up or pending)):
        judged.note(leaves)
        return
    runs = TrialRuns(model, step, nesting, device, gradients, reached)
    try:
        repeated = _Repeated(runs, leaves, texts)
        sets_up = repeated.compare() if judged is None else True
        if repeated.kept and not pending:
            repeated.refuse_kept()
    except RequestError as error:
        if pending:  # these messages name the kept value
            raise pending[0].refusal from error
        raise
    if sets_up or pending:
        others = [one.batches for one in known if one.key[0] == nesting]
        refuse_other_set_up(runs, leaves, dict.fromkeys(b for batches in others for b in batches), pending)
    if judged is None:
        with suppress(TypeError):  # a step of a class without weak references
            judged = _Known(weakref.ref(model), weakref.ref(step), key)
            _known.append(judged)
    if judged is not None:
        judged.sets_up |= sets_up or bool(pending)
        judged.note(leaves)


@define(eq=False)
class _Known:
    """A step that is known to compute the same when it runs again.

    Args:
        model, step: weak references.
        key: everything that it reads other than the shapes of tensors.
        sets_up: whether the first run sets something up.
        batches: the last ones for which it was captured.
    """

    model: Any
    step: Any
    key: Any
    sets_up: bool = False
    batches: deque[Leaves] = field(factory=lambda: deque(maxlen=_BATCHES))

    def note(self, leaves: Leaves) -> None:
        """Record a batch for which the step was captured."""
        if leaves not in self.batches:
            self.batches.append(leaves)


_BATCHES = 4
"""Number of earlier batches with which a step that sets something up is tried."""

_known: deque[_Known] = deque(maxlen=16)


class _Repeated:
    """The comparison of trial runs.

    Args:
        runs: of the step.
        leaves: of the batch.
        texts: whether the step needs values for texts alone.

    Attributes:
        kept: the names of numbers that differ in each run.
    """

    def __init__(self, runs: TrialRuns, leaves: Leaves, texts: bool) -> None:
        self._runs, self._leaves, self._texts = runs, leaves, texts
        self._changed: list[str] = []
        self.kept: set[Any] = set()

    def compare(self) -> bool:
        """Refuse runs that differ.

        Returns:
            Whether the first run set something up: it changed values that the second run did not change.
        """
        with self._runs.apart():
            start, first, once = self._runs.reached, self._run(), self._runs.now()
            second, twice = self._run(), self._runs.now()
            later, early = list(_others(once, twice)), list(_others(start, once))
            self._changed = [*later, *early]
            self.kept = {twice.owners[place][1] for place in later if place in twice.owners}
            self._refuse_read_kept()
            sets_up = first_difference(first, second) is not None or not set(early) <= set(later)
            if first_difference(first, second) is not None:
                third = self._run()
                self._refuse_other(second, third, "when it runs again")
                second = third
            refuse_outside(second)
            self._refuse_later(second, once, twice, "after more steps")
            for number in _OTHERS if self._runs.gave_number else ():
                before = self._runs.now()
                self._run(number)
                self._refuse_other(second, self._run(), _OTHER_NUMBERS)
                after = self._runs.now()
                self._run(number)
                self._refuse_later(second, before, after, _OTHER_NUMBERS)
            for number in _IN_TEXTS if self._texts and self._runs.ended else ():
                self._refuse_read_text(second, self._run(number))
        check_foreign_gradients(start, self._runs.given)  # outside, where its warnings are shown
        return sets_up

    def refuse_kept(self) -> None:
        """Refuse a step that differs with other values of the numbers that it keeps."""
        if (found := follow_kept(self._runs, self._leaves, self.kept).differs) is not None:
            raise refusal_of(found, cause_in(self._changed), "after more steps")

    def _refuse_later(self, known: list[RecordedOperator], before: Reached, after: Reached, when: str) -> None:
        """Refuse a step that differs after its counts and lists, which changed between two moments, have grown more."""
        numbers, sizes = _numbers(before), _sizes(before)
        counts = {p: n - numbers[p] for p, n in _numbers(after).items() if p in numbers and n != numbers[p]}
        grown = [(h, h[-1]) for h, items in after.sequences if h and sizes.get(id(h), len(items)) < len(items)]
        for far in _FAR if counts or grown else ():
            for place, by in counts.items():
                after.assign(place, after.number(place) + (far if by > 0 else -far))
            for held, last in grown:
                held.extend([last] * min(far, _LONGER))
            self._refuse_other(known, self._run(), when)

    def _refuse_other(self, known: list[RecordedOperator], other: list[RecordedOperator], when: str) -> None:
        self._refuse_read_kept()
        if (found := first_difference(known, other)) is not None:
            raise refusal_of(found, cause_in(self._changed), when)

    def _refuse_read_text(self, known: list[RecordedOperator], other: list[RecordedOperator]) -> None:
        if self._runs.ended and (found := first_difference(known, other)) is not None:
            raise RequestError(
                f"{found.line or 'the step'}: the step computes something else here if the values differ that it "
                "writes into a text, such as its length, and a text is only known after the step: use the tensor "
                "itself in the condition"
            )

    def _refuse_read_kept(self) -> None:
        if self._runs.read_kept:
            raise read_kept_refusal(self._runs.read_kept, self._changed)

    def _run(self, number: float = NUMBER) -> list[RecordedOperator]:
        return self._runs.run(self._leaves, number)


def _numbers(reached: Reached) -> dict[str, Any]:
    """Place → the number there, for numbers that can be set."""
    return {place: reached.values[place][1] for place in reached.owners}  # type: ignore[index]


def _sizes(reached: Reached) -> dict[int, int]:
    """Identity of a list → its length."""
    return {id(held): len(items) for held, items in reached.sequences}


def _others(one: Reached, other: Reached) -> Iterator[str]:
    """Places with another value later; without tensors and weak references, which differ in each run."""
    for place, value in other.values.items():
        then = one.values.get(place, value)
        if then != value and not (isinstance(value, tuple) and value[0] in ("a tensor", "weakref.ReferenceType")):
            yield place
