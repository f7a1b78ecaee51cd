"""The fastest call of an operator: torch's own Python binding, where it dispatches exactly the operator of the graph.

A call through ``OpOverload`` passes its arguments through a generic interpreter of schemas; the bindings of functions
and ``Tensor`` methods are generated for each operator. Which overload a binding dispatches to depends on its arguments,
so each kind of call is tried once with fake tensors, under a dispatch mode that compares what arrives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.nodes import arguments_by_name
from ..graph.sizes import equal

aten = torch.ops.aten

_VIEWS = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.view.default,
}
"""Views that often return the whole tensor unchanged."""

_BINDINGS = (torch, torch._C._nn, Tensor)
"""The modules and the class that have the bindings."""

_known: dict[str, Callable[..., Any]] = {}


def binding_of(node: fx.Node) -> Callable[..., Any]:
    """The function to call for an operator of a graph, with the arguments of its node.

    Args:
        node: with the fake results of its inputs and its own in ``meta``.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target  # type: ignore[no-any-return]
    tensors = node.all_input_nodes
    if target.namespace != "aten" or not tensors or not all(isinstance(n.meta.get("val"), Tensor) for n in tensors):
        return target._op  # factories, too: a binding obeys the default device
    number = {source: f"tensor {source.meta['val'].dim() == 0}" for source in tensors}
    key = str((target, fx.map_arg((node.args, node.kwargs), lambda n: number[n])))
    if key not in _known:
        _known[key] = _find_binding(node, target)
    return _known[key]


def same_tensor(node: fx.Node) -> fx.Node | None:
    """The input of a view that returns it unchanged, and can replace the view; None for other nodes."""
    source, value = node.args[0] if node.args else None, node.meta.get("val")
    if node.target not in _VIEWS or not isinstance(source, fx.Node) or not isinstance(value, Tensor):
        return None
    given = source.meta.get("val")
    return source if isinstance(given, Tensor) and equal(_layout(given), _layout(value)) else None


def _layout(tensor: Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


def _find_binding(node: fx.Node, target: torch._ops.OpOverload) -> Callable[..., Any]:
    """The first binding that dispatches to the operator alone; without any the operator itself."""
    name = target._schema.name.partition("::")[2]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    wanted = _Arrivals(target, args, kwargs)
    for owner in _BINDINGS:
        binding: Any = getattr(owner, name, None)
        if binding is None or isinstance(binding, type) or hasattr(binding, "__code__"):
            continue  # a function in Python calls operators of its own
        wanted.calls = []
        try:
            with torch.no_grad(), wanted:
                binding(*args, **kwargs)
        except Exception:  # it has no such arguments
            continue
        if wanted.calls == [True]:
            return binding  # type: ignore[no-any-return]
    return target._op


class _Arrivals(TorchDispatchMode):
    """Compares operators with the one that is wanted.

    Attributes:
        calls: for each operator whether it was that one, with its arguments.
    """

    def __init__(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target, self._given = target, arguments_by_name(target, args, kwargs)
        self.calls: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # fake tensors are asked for their device
            return func(*args, **(kwargs or {}))
        same = func is self._target and _equal(self._given, arguments_by_name(func, args, kwargs or {}))
        self.calls.append(same)
        if not same:
            raise TypeError(f"{func} is another operator")
        return func(*args, **(kwargs or {}))


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments are the same tensor or the same value, of the same type."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
