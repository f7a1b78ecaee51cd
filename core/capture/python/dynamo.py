"""Capture by Dynamo, which reads Python's bytecode; it stops at operations that Dynamo would silently omit.

Dynamo omits what a step prints, traces through autograd functions and hooks without the user's backward, and does not
keep attributes that a module sets. The result would not be equal, so such a step is not captured by Dynamo.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.variables import misc, nn_module, tensor

from ..values.containers import BatchNesting
from .torch_settings import Autocasts

_Module = nn_module.UnspecializedNNModuleVariable


class PlainStep(nn.Module):
    """The step as a plain module, which Dynamo can trace.

    Args:
        model, step: the user's.
        nesting: of the batch, which ``forward`` gets in pytree containers.
        autocasts: in which the step runs.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[nn.Module, Any], Any],
        nesting: BatchNesting,
        autocasts: Autocasts | None = None,
    ) -> None:
        super().__init__()
        self._autocasts = autocasts.entered if autocasts is not None else ()
        self.model = model
        self._step = step
        self._restored = nesting.restored if nesting.node is not None else None

    def forward(self, batch: Any) -> Any:
        given = batch if self._restored is None else self._restored(batch)
        for kind, dtype, cached in self._autocasts[:1]:
            with torch.autocast(kind, dtype, cache_enabled=cached):
                return self._step(self.model, given), []
        return self._step(self.model, given), []


class Omitted(Exception):
    """Dynamo would silently omit an operation."""


def _refuses(what: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise Omitted(f"Dynamo would omit {what}")

    return refuse


_STOPS = (
    (misc.AutogradFunctionVariable, "call_apply", _refuses("the backward of an autograd function")),
    (misc.DebuggingVariable, "call_function", _refuses("what the step prints")),
    (tensor.TensorVariable, "_method_register_hook", _refuses("a hook on a gradient")),
    (_Module, "method_setattr_standard", _refuses("what a module sets")),
    (tensor.TensorVariable, "method_attr_data", _refuses("what is done to the data of a tensor")),
)
"""Dynamo's handlers of the operations that it would omit: a class, its method, and the replacement, which raises."""


@contextmanager
def nothing_omitted() -> Iterator[None]:
    """Within this context, capture by Dynamo stops at operations that it would omit."""
    call_method = _Module.call_method

    def call(module: Any, tx: Any, name: str, *given: Any, **named: Any) -> Any:
        if name in ("__setattr__", "__delattr__"):
            raise Omitted("Dynamo would omit what a module sets")
        return call_method(module, tx, name, *given, **named)

    with ExitStack() as stack:
        for owner, name, refuse in _STOPS:
            stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(mock.patch.object(_Module, "call_method", call))
        yield


def refuse_transforms(graph: fx.Graph) -> None:
    """Refuse calls that a later trace cannot differentiate: those of `torch.func`, and ``Tensor.set_``.

    Args:
        graph: Dynamo's capture.

    Raises:
        Omitted: there is one.
    """
    for node in graph.nodes:
        transforms = getattr(node.target, "__module__", "").startswith("torch._functorch")
        if node.op == "call_function" and (transforms or getattr(node.target, "_opname", "") == "set_"):
            raise Omitted(f"Dynamo captured {node.target}, which cannot be differentiated")
