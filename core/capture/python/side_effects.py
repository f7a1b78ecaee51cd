"""Finds Python objects outside of the model that a step changes: a captured step changes them only once, at capture.

Objects that the step only writes, such as a list of losses, are restored, with a warning. A value that it also reads,
such as a counter in a branch, would change from one microbatch to the next in one process, and is refused.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from attrs import frozen
from torch import Tensor

from ...errors import RequestError
from ..values.late_numbers import holds_captured
from ..values.nesting import tensors_of
from ..values.user_lines import warn_at
from .pending_refusals import PendingRefusal, have_grown
from .reachable.code_names import read_line, written_line
from .reachable.compared_values import is_leaf, plain_items
from .reached import Reached

FIX = (
    "the Python of a captured step runs only once; make it a buffer of the model, give it with the batch as a tensor, "
    "or change it between steps"
)


@frozen
class _Written:
    """A value outside of modules that a step wrote.

    Args:
        place: its place, as text.
        name: of the attribute or variable, or the key.
        carries: whether it may carry a state from one microbatch to the next.
        sets_up: whether the first run may only set it up.
        number: its name, if it is a number.
        kept: whether the number was computed from a tensor.
    """

    place: str
    name: Any
    carries: bool
    sets_up: bool = False
    number: Any = None
    kept: bool = False


@contextmanager
def outside_restored(
    reached: Reached, modules: Iterable[dict[str, Any]], pending: list[PendingRefusal] | None = None
) -> Iterator[None]:
    """The context of the capture of a step; at its end, values that it wrote outside of modules are restored.

    Args:
        reached: what the step reaches, before it runs.
        modules: the attributes of modules, which are handled elsewhere.
        pending: gets the refusals of values that the step also reads, if they may be the size of a table that it set
            up; without it they are raised.

    Raises:
        RequestError: the step also reads a value that it wrote.
    """
    others = {id(own) for own in modules}
    finished = False
    caches = [(cache, cache.cache_info().misses) for cache in reached.caches]
    keys = [(held, set(held)) for held, _ in (*reached.sizes, *reached.orders) if id(held) not in others]
    written: list[_Written] = []
    try:
        yield
        finished = True
    finally:
        for place, (holder, name, before) in reached.named_entries():
            now = holder.get(name)
            if now is before or id(holder) in others or _equal(now, before):
                continue
            holder[name] = before
            if _carries(before, now):
                number = _is_plain(before) and isinstance(now, int | float)  # known or late
                sets_up = number or have_grown([(before, now)])
                written.append(_Written(place, name, True, sets_up, name if number else None, not _is_plain(now)))
        for place, (held, items) in reached.named_sequences():
            now = plain_items(held)
            if len(now) == len(items) and all(map(is_, now, items)):
                continue
            held.clear()
            held.extend(items)
            changed = [i for i, (old, new) in enumerate(zip(items, now, strict=False)) if _carries(old, new)]
            changed = [i for i in changed if now[i] is not items[i]]
            single = len(changed) == 1 and _is_plain(items[changed[0]])
            index, late = (changed[0], not _is_plain(now[changed[0]])) if single else (None, False)
            written.append(_Written(place, place.rpartition(".")[2], bool(changed), single, index, late))
        for place, (holder, name) in reached.owners.items():  # of classes, slots, and functions around
            then: Any = reached.values[place]
            if id(holder) not in others and not isinstance(then[1], str) and reached.number(place) != then[1]:  # no NaN
                plain = not math.isnan(reached.number(place))
                reached.assign(place, then[1])
                written.append(_Written(place, name, True, plain, name))
        _restore_variables(reached)
        _drop_captured(keys)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold captured values
    if finished:
        _report(reached, written, pending)


def _restore_variables(reached: Reached) -> None:
    """Restore class attributes, slots and variables of enclosing functions that hold captured values."""
    for read, assign, before in reached.variables:
        if (now := read()) is not before and holds_captured(now):
            assign(before)


@contextmanager
def tensors_restored(reached: Reached, after_failure: bool = False) -> Iterator[None]:
    """The context of a run of a step to observe its regions, or of a capture that may fail; at its end, tensors and
    late numbers of this run are removed from all dicts and lists that the step reaches.

    Args:
        reached: what the step reaches, before it runs.
        after_failure: whether to do so only after an exception.
    """
    keys = [(held, set(held)) for held, _ in (*reached.sizes, *reached.orders)]
    finished = False
    try:
        yield
        finished = after_failure
    finally:
        if not finished:
            _put_back(reached, keys)


def _put_back(reached: Reached, keys: Iterable[tuple[dict[Any, Any], set[Any]]]) -> None:
    def belongs(value: Any) -> bool:
        return bool(tensors_of(value)) or holds_captured(value)

    for held, known in keys:
        for key in [key for key, value in held.items() if key not in known and belongs(value)]:
            del held[key]
    for holder, name, before in reached.entries:
        if holder.get(name) is not before and belongs(holder.get(name)):
            holder[name] = before
    for held, items in reached.sequences:
        now = plain_items(held)
        other = len(now) != len(items) or not all(map(is_, now, items))
        if other and any(belongs(item) for item in now):
            held.clear()
            held.extend(items)


def _drop_captured(known: Iterable[tuple[dict[Any, Any], set[Any]]]) -> None:
    """Remove new entries with captured values from dicts, because they are not of a real step.

    Args:
        known: the dicts, with their earlier keys.
    """
    for held, keys in known:
        for key in [key for key, value in held.items() if key not in keys and holds_captured(value)]:
            del held[key]


def _equal(now: Any, before: Any) -> bool:
    """Whether two values are compared by value, are known, and equal."""
    return is_leaf(now) and is_leaf(before) and not holds_captured((now, before)) and bool(now == before)


def _report(reached: Reached, written: Iterable[_Written], pending: list[PendingRefusal] | None) -> None:
    """Refuse values that the step also reads, unless the step may only set them up; warn about the others."""
    for one in written:
        refusal = _refusal(reached, one) if one.carries else None
        if refusal is None:
            continue
        if pending is None or not one.sets_up:
            raise refusal
        pending.append(PendingRefusal(refusal, one.number, one.kept))
    for one in written:
        line = written_line(reached.codes, one.name) if isinstance(one.name, str) else None
        warn_at(line or reached.line_of(one.place), _remark(one.place))


def _carries(before: Any, now: Any) -> bool:
    """Whether a value that the step replaced is a state: a number, or a tensor that was a tensor before."""
    if isinstance(before, Tensor):
        return holds_captured(now)
    return isinstance(before, int | float) and (isinstance(now, int | float) or holds_captured(now))


def _refusal(reached: Reached, one: _Written) -> RequestError | None:
    line = read_line(reached.codes, one.name) if isinstance(one.name, str) else reached.line_of(one.place)
    if line is None:
        return None
    return RequestError(f"{line}: the step reads '{one.place}' here and writes it, too: {FIX}")


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, and not a late number."""
    return isinstance(value, int | float) and not holds_captured(value)


def _remark(place: str) -> str:
    return f"the step writes '{place}': {FIX}, or return it as a metric"
