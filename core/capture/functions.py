"""Python that is called as one operator: custom autograd functions, whose backward is the user's own.

Tracing alone would look into such a function's forward and differentiate what it finds there, and lose the backward
that the user wrote. Under `own_functions` a call becomes one node of the captured graph that calls the user's function
again; where a stage's programs are derived, forward and backward are traced as they are written.
"""

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from attrs import define
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ..errors import RequestError

_library = torch.library.Library("panpipe_python", "DEF")
_library.define("call(Tensor[] given, int number) -> Tensor[]")
_numbers = itertools.count()
_calls: dict[int, "_Call"] = {}


@define
class _Call:
    """A call of a custom autograd function, with everything given to it but tensors.

    Args:
        function: the user's function.
        apply: its own ``apply``.
        leaves: what was given, flattened; None where a tensor stood.
        places: positions of the tensors.
        spec: the nesting of what was given.
        returned: the nesting of what it returns, and positions of tensors there; known after the first call.
        others: what it returns beside tensors, by position.
        hook: whether it is a hook on a tensor's gradient.
    """

    function: type[torch.autograd.Function]
    apply: Callable[..., Any]
    leaves: list[Any]
    places: list[int]
    spec: pytree.TreeSpec
    returned: tuple[pytree.TreeSpec, list[int]] | None = None
    others: list[Any] | None = None
    hook: bool = False

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, given, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        versions = [tensor._version for tensor in given]
        flat, spec = pytree.tree_flatten(self.apply(*args, **kwargs))
        if versions != [tensor._version for tensor in given]:
            raise RequestError(
                f"autograd function {self.function.__qualname__} writes what it is given in place: "
                "a captured one may not; return a new tensor"
            )
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        self.returned, self.others = (spec, places), [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        return [flat[i] for i in places]

    def nested(self, found: list[Tensor]) -> Any:
        """What the function returns, from its tensors."""
        assert self.returned is not None
        assert self.others is not None
        spec, places = self.returned
        leaves = list(self.others)
        for place, tensor in zip(places, found, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, spec)


_library.impl("call", lambda given, number: _calls[number](given), "CompositeImplicitAutograd")


@contextmanager
def own_functions() -> Iterator[None]:
    """Within, every call of a custom autograd function is recorded as one operator."""
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    inside = False

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if inside or not places:
            return original(function, *args, **kwargs)
        number = next(_numbers)
        bare = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        _calls[number] = call = _Call(function, lambda *a, **k: original(function, *a, **k), bare, places, spec)
        inside = True
        try:
            found = torch.ops.panpipe_python.call([leaves[i] for i in places], number)
        finally:
            inside = False
        return call.nested(found)

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        if tensor.requires_grad and not inside:
            number = next(_numbers)
            run = functools.partial(original, _Hooked)
            _calls[number] = _Call(
                _Hooked, run, [None, hook], [0], pytree.tree_flatten(((tensor, hook), {}))[1], hook=True
            )
            torch.ops.panpipe_python.call([tensor], number)
        return RemovableHandle(OrderedDict())

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.Tensor, "register_hook", register_hook),
        without_checkpoints(),
    ):
        yield


class _Hooked(torch.autograd.Function):
    """The identity; its gradient is what a user's hook makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        changed = ctx.hook(gradient)
        return (gradient if changed is None else changed), None


def place_hooks(graph: fx.Graph) -> None:
    """Put every hooked tensor's hook between the tensor and all its readers.

    Args:
        graph: a captured graph; changed in place.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.panpipe_python.call.default or not _calls[node.args[1]].hook:
            continue
        source = node.args[0][0]
        with graph.inserting_after(source):
            call = graph.node_copy(node)
        with graph.inserting_after(call):
            hooked = graph.call_function(operator.getitem, (call, 0))
        hooked.meta = dict(source.meta)
        source.replace_all_uses_with(hooked, delete_user_cb=lambda user, call=call: user is not call)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Within, activation checkpointing calls its function and keeps everything.

    What is recomputed is a matter of the plan. The numbers are the same, but for keyed random ones: a recomputation in
    the backward would draw further ones.
    """

    def plain(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    def call(run: Callable[..., Any], _preserve: bool, *given: Any) -> Any:
        return run(*given)

    with (
        mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", plain),
        mock.patch.object(CheckpointFunction, "apply", call),
    ):
        yield


def called_name(node: fx.Node) -> str | None:
    """Name of the function that a node calls, or None for an ordinary operator."""
    if node.target is not torch.ops.panpipe_python.call.default:
        return None
    return _calls[node.args[1]].function.__name__  # type: ignore[index]
