"""Capture by Dynamo, which reads Python's bytecode: what it would pass over without a word stops it.

Dynamo leaves out what a step prints, looks into autograd functions and hooks and loses the backward that the user
wrote, and carries no attribute over that a module sets. Each of these would train something else, so such a step is not
captured by Dynamo at all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.variables import misc, nn_module, tensor

from ..values.containers import BatchNesting
from .surroundings import Autocasts

_Module = nn_module.UnspecializedNNModuleVariable


class PlainStep(nn.Module):
    """The step as a module and nothing more: what Dynamo can look through.

    Args:
        model, step: the user's.
        nesting: of the batch, which ``forward`` gets in pytree's own containers.
        autocasts: that the step runs in.
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


class PassedOver(Exception):
    """Dynamo came to something that it would pass over."""


def _refuses(what: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise PassedOver(f"Dynamo would pass over {what}")

    return refuse


_STOPS = (
    (misc.AutogradFunctionVariable, "call_apply", _refuses("the backward of an autograd function")),
    (misc.DebuggingVariable, "call_function", _refuses("what the step prints")),
    (tensor.TensorVariable, "_method_register_hook", _refuses("a hook on a gradient")),
    (_Module, "method_setattr_standard", _refuses("what a module sets")),
    (tensor.TensorVariable, "method_attr_data", _refuses("what is done to the data of a tensor")),
)
"""Where Dynamo handles what it may not pass over: a class, its method, and what happens there instead."""


@contextmanager
def nothing_passed_over() -> Iterator[None]:
    """Within, capture by Dynamo stops at what it would pass over."""
    call_method = _Module.call_method

    def call(module: Any, tx: Any, name: str, *given: Any, **named: Any) -> Any:
        if name in ("__setattr__", "__delattr__"):
            raise PassedOver("Dynamo would pass over what a module sets")
        return call_method(module, tx, name, *given, **named)

    with ExitStack() as stack:
        for owner, name, refuse in _STOPS:
            stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(mock.patch.object(_Module, "call_method", call))
        yield


def refuse_transforms(graph: fx.Graph) -> None:
    """Refuse what no later trace can differentiate: calls of `torch.func`, and data that is taken from another tensor.

    Args:
        graph: as Dynamo captured it.

    Raises:
        PassedOver: there is one.
    """
    for node in graph.nodes:
        transforms = getattr(node.target, "__module__", "").startswith("torch._functorch")
        if node.op == "call_function" and (transforms or getattr(node.target, "_opname", "") == "set_"):
            raise PassedOver(f"Dynamo captured {node.target}, which cannot be differentiated")
