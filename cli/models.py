"""Models by ``module:factory``, for the commands that take one; the only planning code that imports torch."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from torch.utils._pytree import tree_unflatten

from ..core.capture.operators import operators_of, tensor_bytes
from ..core.capture.step import capture_step
from ..core.errors import RequestError
from ..core.graph import OpGraph
from ..runtimes.microbatches import split_batch
from ..runtimes.operator_profile import profile_operators

Factory = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]]


def load_factory(name: str) -> Factory:
    """The function ``factory`` of ``module``, written ``module:factory``; modules are also found in this directory.

    Raises:
        RequestError: it is written otherwise, the module cannot be imported, or it has no such function.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise RequestError(f"'{name}' is no model: write module:factory, such as examples.gpt2:make")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        factory = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise RequestError(f"cannot import '{module}' for '{name}': {error}; run where the module is found") from None
    finally:
        sys.path.remove(here)  # the module may have put others in front
    if not callable(factory):
        raise RequestError(f"module '{module}' has no function '{attribute}': name one that it has")
    return factory  # type: ignore[no-any-return]


def load_model(name: str) -> tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]:
    """Model, step and example batch from ``module:factory``.

    Raises:
        RequestError: the factory cannot be found or gives something else.
    """
    made = load_factory(name)()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise RequestError(f"'{name}' returned a {type(made).__name__}: it returns (model, step, example_batch)")
    return made


def measured_operators(name: str, microbatches: int) -> tuple[OpGraph, dict[str, int]]:
    """Capture a model's step and time its operators on this host, one microbatch.

    Args:
        name: ``module:factory``.
        microbatches: how many the example batch is cut into.

    Returns:
        The graph with times, and the bytes of each parameter.

    Raises:
        RequestError: the factory cannot be found or gives something else, or the step cannot be captured.
    """
    model, step, batch = load_model(name)
    pieces, nesting = split_batch(batch, microbatches)
    operators = operators_of(capture_step(model, step, tree_unflatten(list(pieces[0].leaves), nesting)))
    parameters = dict(model.named_parameters())
    graph = profile_operators(operators, parameters, dict(model.named_buffers()), pieces[0].leaves)
    return graph, {key: tensor_bytes(parameter) for key, parameter in parameters.items()}
