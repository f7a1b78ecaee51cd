"""Finds Python objects outside of the model that a step changes: a captured step changes them only once, at capture.

Objects that the step only writes, such as a list of losses, are restored, with a warning. A value that it also reads,
such as a counter in a branch, would change from one microbatch to the next in one process, and is refused.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from attrs import frozen
from torch import Tensor

from ...errors import RequestError
from ..values.late_numbers import holds_captured
from ..values.nesting import tensors_of
from ..values.user_lines import warn_at
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
    """

    place: str
    name: Any
    carries: bool


IsConstant = Callable[[Any], bool]
"""Whether a value is the same in each run of the step, such as a table of positions."""


def is_table(old: Any, new: Any, is_constant: IsConstant) -> bool:
    """Whether the step only set up a value, such as a table of positions, or let it grow: later runs compute it again.

    Args:
        old, new: what was there, and what the step put there.
        is_constant: of what it computes.
    """
    state = isinstance(old, Tensor) and (old.is_meta or old.shape == getattr(new, "shape", None))
    return bool(tensors_of(new)) and is_constant(new) and not state


@contextmanager
def outside_restored(
    reached: Reached, modules: Iterable[dict[str, Any]], is_constant: IsConstant = lambda value: True
) -> Iterator[Callable[[], str]]:
    """The context of the capture of a step; at its end, values that it wrote outside of modules are restored.

    Args:
        reached: what the step reaches, before it runs.
        modules: the attributes of modules, which are handled elsewhere.
        is_constant: of tensors that the step computes.

    Yields:
        A function that returns the name of a value that the step now keeps outside of modules and that is not the same
        in each run; "" if there is none.

    Raises:
        RequestError: the step also reads a value that it wrote.
    """
    others = {id(own) for own in modules}
    finished = False
    caches = [(cache, cache.cache_info().misses) for cache in reached.caches]
    keys = [(held, set(held)) for held, _ in (*reached.sizes, *reached.orders) if id(held) not in others]
    written: list[_Written] = []
    try:
        yield lambda: _kept(reached, keys, lambda value: holds_captured(value) and not is_constant(value))
        finished = True
    finally:
        for place, (holder, name, before) in reached.named_entries():
            now = holder.get(name)
            if now is before or id(holder) in others or _equal(now, before):
                continue
            holder[name] = before
            if _carries(before, now) and not is_table(before, now, is_constant):
                written.append(_Written(place, name, True))
        for place, (held, items) in reached.named_sequences():
            now = plain_items(held)
            if len(now) == len(items) and all(map(is_, now, items)):
                continue
            held.clear()
            held.extend(items)
            changed = [i for i, (old, new) in enumerate(zip(items, now, strict=False)) if _carries(old, new)]
            changed = [i for i in changed if now[i] is not items[i]]
            written.append(_Written(place, place.rpartition(".")[2], bool(changed)))
        for place, (holder, name) in reached.owners.items():  # of classes, slots, and functions around
            then: Any = reached.values[place]
            if id(holder) not in others and not isinstance(then[1], str) and reached.number(place) != then[1]:  # no NaN
                reached.assign(place, then[1])
                written.append(_Written(place, name, True))
        _restore_variables(reached)
        _drop_captured(keys)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold captured values
    if finished:
        _report(reached, written)


def _kept(reached: Reached, keys: Iterable[tuple[dict[Any, Any], set[Any]]], changes: Callable[[Any], bool]) -> str:
    """The place of the first value outside of modules for which ``changes`` is true; see `outside_restored`."""
    for place, (holder, name, _) in reached.named_entries():
        if changes(holder.get(name)):
            return f"'{place}'"
    for place, (held, _) in reached.named_sequences():
        if any(map(changes, plain_items(held))):
            return f"'{place}'"
    new = [key for held, known in keys for key, value in held.items() if key not in known and changes(value)]
    if new:
        return f"'{new[0]}'"
    return "a variable" if any(changes(read()) for read, _, _ in reached.variables) else ""


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
    _restore_variables(reached)
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


def _report(reached: Reached, written: Iterable[_Written]) -> None:
    """Refuse values that the step also reads; warn about the others."""
    for one in written:
        if one.carries and (refusal := _refusal(reached, one)) is not None:
            raise refusal
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


def _remark(place: str) -> str:
    return f"the step writes '{place}': {FIX}, or return it as a metric"
