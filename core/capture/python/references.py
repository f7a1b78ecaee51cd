"""References to a model's parameters and buffers from elsewhere: variables, lists, dicts and sets that a step reads.

A captured run has other tensors in the modules. ``params = list(model.parameters())`` around a step, an optimizer's
``param_groups``, or ``if p not in no_decay`` would still mean the real ones: their gradients would be missing, and no
tensor would be found. So during a run these values are replaced by copies that have the tensors of the modules.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .guards import Guards
from .named import is_small_container


@contextmanager
def references_followed(model: nn.Module, guards: Guards) -> Iterator[None]:
    """The context of a run in which the modules of a model have other tensors.

    Args:
        model: with these tensors.
        guards: the values that the step's code names, when the model had its own tensors.
    """
    tensors = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    now = dict(tensors)
    others = {key: now[name] for key, name in guards.tensors.items() if name in now and id(now[name]) != key}
    replaced = []
    for named in guards.found.named.values() if others else ():
        if named.now() is named.value and (other := _with(named.value, others)) is not named.value:
            named.assign(other)
            replaced.append((named, other))
    try:
        yield
    finally:
        for named, other in replaced:
            if named.now() is other:
                named.assign(named.value)


def _with(value: Any, others: Mapping[int, Tensor], depth: int = 4) -> Any:
    """A value with other tensors in place of the model's; the value itself if it has none of them."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return others.get(id(value), value)
    if kind is int:
        return id(others[value]) if value in others else value  # ``id(p) in exempt``
    if kind not in (list, tuple, set, frozenset, dict) or not depth or not is_small_container(value):
        return value
    parts = list(value.items()) if kind is dict else list(value)
    new = [_with(part, others, depth - (kind is not dict)) for part in parts]
    if all(one is other for one, other in zip(parts, new, strict=True)):
        return value
    return kind(new)
