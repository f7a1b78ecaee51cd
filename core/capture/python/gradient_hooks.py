"""Refuses hooks that change gradients of parameters and modules, because a captured graph does not call them.

A hook that only reads a gradient, as for a histogram, does not change the training; a warning says that it is not
called. A hook that returns a gradient, or that runs on ``p.grad`` after accumulation, changes it, and is refused.
"""

import dis
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import RequestError

_FIX = (
    "a pipeline does not call it; change gradients by Tensor.register_hook in the forward, or by clip_norm= or the "
    "optimizer"
)


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks that may change a gradient, and warn about the others.

    Args:
        model: the user's module.

    Raises:
        RequestError: there is one; the message has its line.
    """
    found = list(_hooks(model))
    for what, hook, accumulated in found:
        code = _code(hook)
        if code is not None and (accumulated or _returns_something(code)):
            raise RequestError(
                f"{code.co_filename}:{code.co_firstlineno}: {what} has this hook on its gradient, which may change it: "
                f"{_FIX}"
            )
    if found:
        warnings.warn(f"{found[0][0]} has a hook on its gradient, one of {len(found)}: {_FIX}", stacklevel=4)


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """The owner of each hook, the hook, and whether it runs after accumulation."""
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            yield f"module '{name}'", hook, False
    for name, parameter in model.named_parameters():
        before, after = _hooks_of(parameter)
        for hook in before:
            yield f"parameter '{name}'", hook, False
        for hook in after:
            yield f"parameter '{name}'", hook, True


def number_of_gradient_hooks(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> int:
    """The number of hooks on the gradients of modules and parameters, which is compared before each step."""
    of_modules = sum(len(module._backward_hooks) + len(module._backward_pre_hooks) for module in modules)
    with torch._C.DisableTorchFunctionSubclass():  # of parameters that other ranks hold, too
        return of_modules + sum(
            len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
            for parameter in parameters
        )


def _hooks_of(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Those that run before its gradient is accumulated, and after; also of parameters that other ranks hold."""
    with torch._C.DisableTorchFunctionSubclass():
        before, after = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(before or {}).values()], [*(after or {}).values()]


def _code(hook: Any) -> Any:
    """A hook's code; None if it is not Python."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):
        function = vars(type(hook)).get("__call__")
    return getattr(function, "__code__", None)


def _returns_something(code: Any) -> bool:
    """Whether a function may return something other than None."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if instruction.opname == "RETURN_VALUE" and not none:
            return True
        before = instruction
    return False
