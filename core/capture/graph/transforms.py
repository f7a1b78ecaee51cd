"""Calls of `torch.func` while a step is captured: each is traced by itself into plain operators.

Export records ``vmap`` and ``grad`` as calls that change Python's state, which no stage can run alone and which no
backward differentiates. `make_fx` traces what they compute: the operators below autograd, derivatives included. These
run in place of the call, so they are captured like operators that the step calls, and differentiated like them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..values.capture_errors import NeedsValue

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
