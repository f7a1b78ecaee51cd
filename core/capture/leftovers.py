"""What a step leaves behind in the model, as Python sees it: attributes that a forward assigns.

A buffer that is assigned anew is a buffer that is written, and becomes one in the captured graph. Everything else that
capture leaves in a module belongs to no real step.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..errors import RequestError

_INTERNAL = {"_parameters", "_buffers", "_modules"}


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Take back, at the end, the fake tensors and the counts that modules were given within.

    Everything else stays: a module may have noted what it set up for all later calls.

    Args:
        model: the user's module.
    """
    before = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for name, module, kept in before:
            for key, value in list(module.__dict__.items()):
                if key in _INTERNAL or value is kept.get(key):
                    continue
                if _holds_fakes(value):
                    _put_back(module, key, kept)
                elif key in kept and _is_count(value) and _is_count(kept[key]) and value != kept[key]:
                    _put_back(module, key, kept)
                    warnings.warn(
                        f"module '{name}' sets its attribute '{key}' in the step: captured, it keeps the value that it "
                        f"has now, {kept[key]!r}; make it a buffer if it is to change",
                        stacklevel=6,
                    )


def _holds_fakes(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _put_back(module: nn.Module, key: str, kept: dict[str, Any]) -> None:
    if key in kept:
        module.__dict__[key] = kept[key]
    else:
        del module.__dict__[key]


@contextmanager
def assigned_buffers_written(model: nn.Module) -> Iterator[None]:
    """Within, a buffer that is assigned a new tensor has, at the end, the new values written into the old one.

    Raises:
        RequestError: the new tensor has another shape or dtype.
    """
    before = [
        (name, module, key, buffer)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for name, module, key, buffer in before:
        assigned: Any = module._buffers.get(key)
        if assigned is buffer:
            continue
        path = f"{name}.{key}" if name else key
        if not isinstance(assigned, Tensor) or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
            what = f"{assigned.dtype} {tuple(assigned.shape)}" if isinstance(assigned, Tensor) else repr(assigned)
            raise RequestError(
                f"the step assigns {what} to buffer '{path}', which is {buffer.dtype} {tuple(buffer.shape)}: "
                "a buffer keeps its shape and dtype; allocate it large enough"
            )
        buffer.copy_(assigned.detach())
        module._buffers[key] = buffer
