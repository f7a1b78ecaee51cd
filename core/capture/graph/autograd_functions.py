"""Python that a captured step calls as operators: custom autograd functions, and calls of `torch.func`.

**Custom autograd functions** are single operators, so that the user's backward is kept. Tracing alone would record the
operators of such a function's forward, differentiate them, and lose the user's backward. Under `own_functions` a call
becomes one node of the captured graph that calls the user's function again; when a stage's programs are derived, the
user's forward and backward are both traced.

**Calls of `torch.func`** are traced by themselves into plain operators. Export records ``vmap`` and ``grad`` as calls
that change Python's state, which no stage can run alone and which no backward differentiates. `make_fx` traces what
they compute: the operators below autograd, derivatives included. These run in place of the call, so they are captured
like operators that the step calls, and differentiated like them.

Operators name Python objects by number, because the arguments of an operator are tensors and plain values. A number is
valid as long as its object is held: by the captured step that gave it, the stages that are cut from it, and their
compiled programs. They are freed with the pipeline, and with them the user's modules.
"""

import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from unittest import mock
from weakref import WeakValueDictionary

import torch
from attrs import define
from torch import Tensor, fx, nn
from torch._functorch import apis, eager_transforms
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ...errors import RequestError
from ..values.capture_errors import NeedsValue
from ..values.late_numbers import LateNumber
from ..values.nesting import Nesting, extract_tensors
from ..values.user_lines import current_line

T = TypeVar("T")

_held: ContextVar[list[object]] = ContextVar("held")


@contextmanager
def holding() -> Iterator[list[object]]:
    """A context in which objects get numbers; yields the list that holds them."""
    found: list[object] = []
    token = _held.set(found)
    try:
        yield found
    finally:
        _held.reset(token)


class NumberedObjects(Generic[T]):
    """Objects of one kind by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, value: T) -> int:
        """Give an object its number, within `holding`."""
        _held.get().append(value)
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def __getitem__(self, number: int) -> T:
        return self._objects[number]


_library = torch.library.Library("panpipe_python", "DEF")
_library.define("call(Tensor[] given, int number) -> Tensor[]")
_calls: "NumberedObjects[_Call]" = NumberedObjects()


@define
class _Call:
    """A call of a custom autograd function, with its arguments other than tensors.

    Args:
        function: the user's function.
        apply: its own ``apply``.
        given: the nesting of its arguments and keyword arguments.
        returned: the nesting of what it returns; known after the first call.
        hook: whether it is a hook on a tensor's gradient.
    """

    function: type[torch.autograd.Function]
    apply: Callable[..., Any]
    given: Nesting
    returned: Nesting | None = None
    hook: bool = False

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        modules = [leaf for leaf in self.given.leaves if isinstance(leaf, nn.Module)]
        if any(parameter.requires_grad for module in modules for parameter in module.parameters()):
            raise RequestError(
                f"{current_line()}autograd function {self.function.__qualname__} takes a module with parameters, whose "
                "gradients its backward would compute by itself, outside of every stage: call the module in the "
                "forward, with torch.utils.checkpoint to save memory"
            )
        args, kwargs = self.given.filled(given)
        versions = [tensor._version for tensor in given]
        found, self.returned = extract_tensors(self.apply(*args, **kwargs))
        if versions != [tensor._version for tensor in given]:
            raise RequestError(
                f"{current_line()}autograd function {self.function.__qualname__} changes its input "
                "in place: a captured function may not do that; return a new tensor"
            )
        return found

    def nested(self, found: list[Tensor]) -> Any:
        """What the function returns, from its tensors."""
        assert self.returned is not None
        return self.returned.filled(found)


_library.impl("call", lambda given, number: _calls[number](given), "CompositeImplicitAutograd")


@contextmanager
def own_functions() -> Iterator[None]:
    """Within this context, every call of a custom autograd function is recorded as one operator."""
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    inside = False

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        tensors, given = extract_tensors((args, kwargs))
        if inside or not tensors:
            return original(function, *args, **kwargs)
        if any(type(leaf) is LateNumber for leaf in pytree.tree_leaves((args, kwargs))):
            raise NeedsValue(f"{function.__name__} needs the value of a number that it is given")
        call = _Call(function, functools.partial(original, function), given)
        number = _calls.add(call)
        inside = True
        try:
            found = torch.ops.panpipe_python.call(tensors, number)
        finally:
            inside = False
        return call.nested(found)

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        if tensor.requires_grad and not inside:
            given, nesting = extract_tensors(((tensor, hook), {}))
            number = _calls.add(_Call(_Hooked, functools.partial(original, _Hooked), nesting, hook=True))
            torch.ops.panpipe_python.call(given, number)
        return RemovableHandle(OrderedDict())

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.Tensor, "register_hook", register_hook),
        without_checkpoints(),
    ):
        yield


class _Hooked(torch.autograd.Function):
    """The identity, whose gradient is changed by a user's hook."""

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
    """Within this context, activation checkpointing calls its function and saves all tensors.

    The plan decides what is recomputed. The results are equal except for keyed random numbers, of which a recomputation
    in the backward would draw more.
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


_CALLS = ((apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl"))
"""What the functions that ``torch.func.vmap``, ``grad`` and ``grad_and_value`` return call."""


@contextmanager
def transforms_traced() -> Iterator[None]:
    """Within this context the outermost calls of `torch.func` run the operators that they consist of.

    Raises:
        NeedsValue: the call draws random numbers, or needs the value of a tensor.
    """
    inside = False

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return original(*args, **kwargs)
            inside = True
            try:
                return _as_operators(original, args, kwargs)
            finally:
                inside = False

        return run

    with ExitStack() as stack:
        for module, name in _CALLS:
            stack.enter_context(mock.patch.object(module, name, traced(getattr(module, name))))
        yield


def _as_operators(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    results: list[Any] = []

    def on_tensors(*tensors: Tensor) -> list[Any]:
        given = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        own_args, own_kwargs = pytree.tree_unflatten(given, structure)
        flat, nesting = pytree.tree_flatten(call(*own_args, **own_kwargs))
        results.append(nesting)
        return flat

    tensors = [leaves[i] for i in places]
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            operators = make_fx(on_tensors)(*tensors)
    except RuntimeError as error:
        raise NeedsValue(f"torch.func transforms Python that is not captured ({error})") from error
    for node in operators.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NeedsValue("a transform of torch.func draws random numbers, which is not captured")
    return pytree.tree_unflatten(operators.forward(*tensors), results[-1])


_KEYS = torch._C.DispatchKey
_OF_AUTOGRAD = (
    _KEYS.AutogradFunctionality, _KEYS.AutogradOther, _KEYS.ADInplaceOrView, _KEYS.FuncTorchDynamicLayerFrontMode,
    _KEYS.FuncTorchDynamicLayerBackMode, _KEYS.FuncTorchGradWrapper, _KEYS.FuncTorchBatched, _KEYS.FuncTorchVmapMode,
)  # fmt: skip
"""Keys of autograd and torch.func."""


@contextmanager
def autograd_in_kernel() -> Iterator[None]:
    """Enable autograd and torch.func, also inside an operator's kernel, where the dispatcher has disabled them."""
    with ExitStack() as stack:
        for key in _OF_AUTOGRAD:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield
