"""What a step leaves behind in the model, as Python sees it: attributes that a forward assigns.

A buffer that is assigned anew is a buffer that is written, and becomes one in the captured graph. Everything else that
capture leaves in a module is taken back, since it belongs to no real step: a module must not hold fake tensors.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import RequestError

_INTERNAL = {"_parameters", "_buffers", "_modules"}
_PLAIN = (bool, int, float, str)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Take back, at the end, what modules were given within; warn where it was a plain value that changed.

    Args:
        model: the user's module.
    """
    before = {name: (module, dict(module.__dict__)) for name, module in model.named_modules()}
    try:
        yield
    finally:
        for name, (module, kept) in before.items():
            changed = [
                key
                for key, value in module.__dict__.items()
                if key not in _INTERNAL and key in kept and isinstance(value, _PLAIN) and value != kept[key]
            ]
            for key in changed:
                warnings.warn(
                    f"module '{name}' sets its attribute '{key}' in the step: a captured step keeps the value that it "
                    f"has now, {kept[key]!r}; make it a buffer if it is to change",
                    stacklevel=5,
                )
            internal = {key: module.__dict__[key] for key in _INTERNAL}
            module.__dict__.clear()
            module.__dict__.update({**kept, **internal})


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
