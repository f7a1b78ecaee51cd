"""Refuses what a captured step does not do, with the line: some calls, hooks on gradients, tensors of others."""

import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ...errors import RequestError, warn_caller
from ...wording import module_text
from ..values.capture_errors import Refused
from ..values.code_origin import is_users_own
from ..values.user_lines import warn_at
from .guards import Guards

_COND = (
    "torch.cond chooses by the value of a tensor, and cannot be captured: write `if` within the forward of a "
    "submodule, which then stays Python on one stage, or compute both ways and choose with torch.where"
)
_LOAD = (
    "the step loads a file by torch.load: a captured step would load it only once; load it before training, and "
    "register what it holds as a buffer of the model"
)
_SENDS = (
    "the step communicates with other processes, which a captured step does not do: panpipe sums gradients, and "
    "what the processes share is given with the batch or written to a buffer between steps"
)
_SAVED = (
    "changes or observes saved tensors by torch.autograd.graph.saved_tensors_hooks, which a pipeline does not call: "
    "leave it out; Memory(offload=) moves saved tensors to the host, and Memory(recompute=) computes them again"
)
_GENERATE = (
    "generation needs the whole model: call model.generate(...) itself in one process, or pipe.save(folder) and load it"
)
_COLLECTIVES = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "send", "recv")
_CALLS = (
    (torch, "cond", _COND), (torch, "load", _LOAD), (saved_tensors_hooks, "__enter__", f"the step {_SAVED}"),
    *((torch.distributed, name, _SENDS) for name in _COLLECTIVES if hasattr(torch.distributed, name)),
)  # fmt: skip


@contextmanager
def calls_refused(*, forward: bool = False) -> Iterator[None]:
    """A context in which these calls of the user's code raise `Refused`; ``save_on_cpu`` changes no value.

    Args:
        forward: whether a function that is only run forward is captured: it may not generate texts, either.
    """
    calls: list[tuple[Any, str, str]] = list(_CALLS)
    if forward and (generation := sys.modules.get("transformers.generation.utils")) is not None:
        calls.append((generation.GenerationMixin, "generate", _GENERATE))

    def refusing(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            derived = (
                bool(args) and isinstance(args[0], saved_tensors_hooks) and type(args[0]) is not saved_tensors_hooks
            )
            if not derived and is_users_own(sys._getframe(1).f_code.co_filename):
                raise Refused(reason)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, reason in calls:
            stack.enter_context(mock.patch.object(owner, name, refusing(getattr(owner, name), reason)))
        yield


def refuse_training_here() -> None:
    """Refuse to train without gradients, or under hooks on saved tensors.

    Raises:
        RequestError: gradients are disabled around the call, or there are such hooks.
    """
    mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
    if not torch.is_grad_enabled():
        raise RequestError(
            f"step(batch) is called under torch.{mode}(), where a loss has no gradient: call it outside of that, or "
            "call evaluate(batch)"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise RequestError(f"the code around step(batch) {_SAVED}")


# Hooks on gradients, which a captured graph does not call


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients of parameters and modules that may change them; warn of others, as for a histogram.

    A hook that returns something, or that runs on ``p.grad`` after accumulation, may change a gradient.

    Args:
        model: the user's module.

    Raises:
        RequestError: there is one; the message has its line.
    """
    fix = (
        "a pipeline does not call it; change gradients by Tensor.register_hook in the forward, or by "
        "Update(clip_norm=) or the optimizer"
    )
    found = list(gradient_hooks(model))
    for what, hook, accumulated in found:
        code = _code(hook)
        if code is not None and (accumulated or _returns_something(code)):
            raise RequestError(
                f"{code.co_filename}:{code.co_firstlineno}: {what} has this hook on its gradient, which may change it: "
                f"{fix}"
            )
    if found:
        warn_caller(f"{found[0][0]} has a hook on its gradient, one of {len(found)}: {fix}")


def gradient_hooks(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """The owner of each hook, the hook, and whether it runs after accumulation."""
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            yield module_text(name), hook, False
    for name, parameter in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that other ranks hold, too
            before, after = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        for hooks in (before, after):
            for hook in (hooks or {}).values():
                yield f"parameter '{name}'", hook, hooks is after


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
    found = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    returned = [before for before, (name, _) in zip([("", ""), *found], found, strict=False) if name == "RETURN_VALUE"]
    returned += [("LOAD_CONST", value) for name, value in found if name == "RETURN_CONST"]
    return any(one != ("LOAD_CONST", None) for one in returned)


# Tensors outside of the model, such as a criterion's parameters, which a pipeline gives no gradient


def check_foreign_gradients(guards: Guards, graph: fx.Graph, loss: str, constants: Mapping[str, Tensor]) -> None:
    """Refuse tensors outside of the model that the step would give a gradient and an optimizer has; warn of others.

    Args:
        guards: the values that the step's code names.
        graph: the captured graph.
        loss: name of its node in the graph.
        constants: name of a placeholder → the constant, which shares the memory of what the step reads.

    Raises:
        RequestError: there is one; the message has its place and the line.
    """
    trained = guards.found.trained if constants else []
    if not trained:
        return
    differentiated = _differentiated(next(node for node in graph.nodes if node.name == loss))
    memory = {constants[n.name].untyped_storage().data_ptr() for n in differentiated if n.name in constants}
    found = [(place, tensor) for place, tensor in trained if tensor.untyped_storage().data_ptr() in memory]
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)] if found else []
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    fix = "make it a parameter of the model, or the module that has it a submodule of the model"
    for place, tensor in found:
        line = guards.line_of(place.rpartition(".")[2])
        what = f"'{place}', which requires a gradient and is no parameter of the model: a pipeline gives it none"
        if id(tensor) in optimized:
            raise RequestError(f"{line}: the step reads {what}, and an optimizer has it; {fix}")
        warn_at(line, f"the step reads {what}; {fix}, or set its requires_grad to False")


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """The nodes to which a loss's gradient flows."""
    seen, waiting = {loss}, [loss]
    while waiting:
        node = waiting.pop()
        modes = node.meta.get("modes")
        if getattr(node.target, "_opname", "") not in ("detach", "detach_") and (modes is None or modes.grad):
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return seen
