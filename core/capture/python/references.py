"""References to a model's parameters and buffers from elsewhere: lists, dicts, sets and variables that a step reads.

A captured run has other tensors in the modules. ``params = list(model.parameters())`` around a step, an optimizer's
``param_groups``, or ``if p not in no_decay`` would still mean the real ones: their gradients would be missing, and no
tensor would be found. So during a run these references are replaced by the tensors that the modules have then.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSet
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from .reached import Reached


@contextmanager
def references_followed(model: nn.Module, reached: Reached) -> Iterator[None]:
    """The context of a run in which the modules of a model have other tensors.

    Args:
        model: with these tensors.
        reached: what the step reaches, found when the model had its own tensors.
    """
    now = {
        name: tensor for tensors in (model.named_parameters, model.named_buffers)
        for name, tensor in tensors(remove_duplicate=False)
    }  # fmt: skip
    others = {key: now[name] for key, name in reached.names_of.items() if name in now and id(now[name]) != key}
    undo: list[Callable[[], None]] = []
    for holder, name, value in reached.entries:
        if holder.get(name) is value and (other := _replaced(value, others)) is not value:
            holder[name] = other
            undo.append(partial(_put_back, holder.get, holder.__setitem__, name, other, value))
    for held, items in reached.sequences:
        for i, value in enumerate(items):
            if i < len(held) and held[i] is value and (other := _replaced(value, others)) is not value:
                held[i] = other
                undo.append(partial(_put_back_in, held, other, value))
    for read, assign, value in reached.variables:
        if read() is value and (other := _replaced(value, others)) is not value:
            assign(other)
            undo.append(partial(_assign_back, read, assign, other, value))
    for container in reached.keyed:
        keys = {id(key): (key, other) for key in container if (other := _replaced_key(key, others)) is not key}
        if not keys:
            continue
        _exchange(container, {key if type(key) is int else id(key): other for key, other in keys.values()})
        back = {other if type(other) is int else id(other): key for key, other in keys.values()}
        undo.append(partial(_exchange, container, back))
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def _replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """A tensor of the model, or a tuple of some, with the present tensors; other values as they are."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, tuple):
        new = [_replaced(item, others) for item in value]
        if any(one is not other for one, other in zip(new, value, strict=True)):
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
    return value


def _replaced_key(key: Any, others: Mapping[int, Tensor]) -> Any:
    """A key as `_replaced`; the identity of a tensor, as a number, also."""
    if type(key) is int and key in others:
        return id(others[key])
    return _replaced(key, others)


def _exchange(container: Any, by: Mapping[int, Any]) -> None:
    """Replace keys of a dict, or members of a set, in their order.

    Args:
        container: the dict or set.
        by: identity of a key, or a number that is one → the key that replaces it.
    """

    def new(key: Any) -> Any:
        return by.get(key if type(key) is int and key in by else id(key), key)

    entries = list(container) if isinstance(container, MutableSet) else list(container.items())
    container.clear()
    if isinstance(container, MutableSet):
        container |= set(map(new, entries))
    else:
        container.update((new(key), value) for key, value in entries)


def _put_back(read: Any, assign: Any, name: Any, other: Any, value: Any) -> None:
    if read(name) is other:
        assign(name, value)


def _put_back_in(held: Any, other: Any, value: Any) -> None:
    for i, item in enumerate(held):
        if item is other:
            held[i] = value


def _assign_back(read: Callable[[], Any], assign: Callable[[Any], None], other: Any, value: Any) -> None:
    if read() is other:
        assign(value)
