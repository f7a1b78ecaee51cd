"""Python objects outside of the model's modules that a step changes: it does so once, while it is captured.

What the step only writes, such as a list of losses, is put back, and a line says that it is not kept. What it reads,
too, as a counter that a branch compares, would go from one microbatch to the next in one process, and is refused.
"""

import dis
import math
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from attrs import frozen
from torch import Tensor

from ...errors import RequestError
from ..values.code_origin import is_users_own
from ..values.nesting import tensors_of
from ..values.user_lines import warn_at
from ..values.values import holds_captured
from .doubts import Doubt, have_grown
from .reached import Reached, is_leaf

FIX = (
    "captured, Python runs once: make it a buffer of the model, give it with the batch as a tensor, or change it "
    "between steps"
)
_WRITES = {"append", "appendleft", "extend", "add", "update", "insert", "clear", "setdefault"}
"""Methods of containers that read nothing of what they have."""


@frozen
class _Written:
    """Something outside of modules that a step wrote.

    Args:
        place: in words.
        name: of the attribute or variable, or the key.
        carries: whether it may carry a state from one microbatch to the next.
        sets_up: whether it may do so only once, and set something up.
        number: its name, if it is a number that is known.
    """

    place: str
    name: Any
    carries: bool
    sets_up: bool = False
    number: Any = None


@contextmanager
def outside_kept(
    reached: Reached, modules: Iterable[dict[str, Any]], doubts: list[Doubt] | None = None
) -> Iterator[None]:
    """Within, a step is captured; at the end what it wrote outside of modules is put back.

    Args:
        reached: what the step reaches, before it runs.
        modules: the attributes of modules, which are seen to elsewhere.
        doubts: gets the refusals of what the step also reads, which may be the size of a table that it has set up;
            without it they are raised.

    Raises:
        RequestError: the step also reads what it wrote.
    """
    others = {id(own) for own in modules}
    finished = False
    caches = [(cache, cache.cache_info().misses) for cache in reached.caches]
    keys = [(held, set(held)) for held, _ in reached.sizes if isinstance(held, dict) and id(held) not in others]
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
                sets_up = have_grown([(before, now)]) or (_is_plain(before) and _is_plain(now))
                written.append(_Written(place, name, True, sets_up, name if _is_plain(now) else None))
        for place, (held, items) in reached.named_sequences():
            if len(held) == len(items) and all(map(is_, held, items)):
                continue
            now = list(held)
            held.clear()
            held.extend(items)
            written.append(_Written(place, place.rpartition(".")[2], any(map(_carries, items, now))))
        for place, (holder, name) in reached.owners.items():  # of classes, slots, and functions around
            then: Any = reached.values[place]
            if id(holder) not in others and not isinstance(then[1], str) and reached.number(place) != then[1]:  # no NaN
                plain = not math.isnan(reached.number(place))
                reached.assign(place, then[1])
                written.append(_Written(place, name, True, plain, name))
        _drop_captured(keys)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may have what is captured
    if finished:
        _report(reached, written, doubts)


@contextmanager
def tensors_put_back(reached: Reached, after_failure: bool = False) -> Iterator[None]:
    """Within, a step runs for what its regions return, or is captured in vain; at the end no dict or list that it
    reaches has tensors or late numbers of that.

    Args:
        reached: what the step reaches, before it runs.
        after_failure: only where it raises.
    """
    keys = [(held, set(held)) for held, _ in reached.sizes if isinstance(held, dict)]
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
        other = len(held) != len(items) or not all(map(is_, held, items))
        if other and any(belongs(item) for item in held):
            held.clear()
            held.extend(items)


def _drop_captured(known: Iterable[tuple[dict[Any, Any], set[Any]]]) -> None:
    """Take new entries out of dicts whose values are captured: they belong to no real step.

    Args:
        known: the dicts, with the keys that they had.
    """
    for held, keys in known:
        for key in [key for key, value in held.items() if key not in keys and holds_captured(value)]:
            del held[key]


def _equal(now: Any, before: Any) -> bool:
    """Whether two values are compared by value, known, and equal."""
    return is_leaf(now) and is_leaf(before) and not holds_captured((now, before)) and bool(now == before)


def _report(reached: Reached, written: Iterable[_Written], doubts: list[Doubt] | None) -> None:
    """Refuse what the step also reads, unless that may only be set up; warn of the rest."""
    for one in written:
        refusal = _refusal(reached, one) if one.carries else None
        if refusal is None:
            continue
        if doubts is None or not one.sets_up:
            raise refusal
        doubts.append(Doubt(refusal, one.number))
    for one in written:
        line = written_line(reached.codes, one.name) if isinstance(one.name, str) else None
        warn_at(line or reached.line_of(one.place), _remark(one.place))


def _carries(before: Any, now: Any) -> bool:
    """Whether a value that was replaced within the step is a state: a count, or a tensor that was one before."""
    if isinstance(before, Tensor):
        return holds_captured(now)
    return isinstance(before, int | float) and (isinstance(now, int | float) or holds_captured(now))


def _refusal(reached: Reached, one: _Written) -> RequestError | None:
    line = read_line(reached.codes, one.name) if isinstance(one.name, str) else reached.line_of(one.place)
    if line is None:
        return None
    return RequestError(f"{line}: the step reads '{one.place}' here and writes it, too: {FIX}")


def _is_plain(value: Any) -> bool:
    """Whether a value is a number itself, and none that is known late."""
    return isinstance(value, int | float) and not holds_captured(value)


def _remark(place: str) -> str:
    return f"the step writes '{place}': {FIX}, or return it as a metric"


def read_line(codes: Iterable[types.CodeType], name: str) -> str | None:
    """The user's first line that reads an attribute or variable, other than to write it again.

    ``self.n += 1`` and ``self.seen.append(x)`` write; ``if self.n > 3`` reads.

    Args:
        codes: of functions.
        name: of the attribute or variable.

    Returns:
        File and line; None where it is only written.
    """
    for code in codes:
        if is_users_own(code.co_filename) and (line := _read_in(code, name)) is not None:
            return f"{code.co_filename}:{line}"
    return None


def written_line(codes: Iterable[types.CodeType], name: str) -> str | None:
    """The user's first line that writes an attribute or variable, or else that names it; None without any.

    Args:
        codes: of functions.
        name: of the attribute or variable.
    """
    users = [code for code in codes if is_users_own(code.co_filename)]
    for writes in (True, False):
        for code in users:
            for instruction in _instructions(code):
                stores = instruction.opname.startswith("STORE_") or not writes
                if instruction.argval == name and stores and instruction.positions is not None:
                    return f"{code.co_filename}:{instruction.positions.lineno}"
    return None


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Those of a function, and of the functions within."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _read_in(code: types.CodeType, name: str) -> int | None:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    lines = [i.positions.lineno if i.positions is not None else None for i in instructions]
    stored = {
        line for i, line in zip(instructions, lines, strict=True)
        if (i.opname.startswith("STORE_") and i.argval == name) or i.opname == "STORE_SUBSCR"
    }  # fmt: skip
    for place, (instruction, line) in enumerate(zip(instructions, lines, strict=True)):
        if instruction.argval != name or not instruction.opname.startswith("LOAD_"):
            continue
        if instruction.opname in ("LOAD_CONST", "LOAD_CLOSURE", "LOAD_FAST") or line in stored:
            continue
        following = instructions[place + 1] if place + 1 < len(instructions) else None
        if following is not None and following.opname.startswith("LOAD_") and following.argval in _WRITES:
            continue
        return line
    nested = (_read_in(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
    return next((line for line in nested if line is not None), None)
