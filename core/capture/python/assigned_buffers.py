"""Buffers that a step assigns a new tensor: the new values are written into the old tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ..values.fake_tensors import have_equal_shapes
from ..values.late_numbers import holds_captured
from .side_effects import IsConstant


@contextmanager
def assigned_buffers_written(
    model: nn.Module, assigned_names: set[str], is_constant: IsConstant = lambda value: True
) -> Iterator[None]:
    """A context at whose end the new values of every assigned buffer are written into its old tensor.

    A constant table that is set up, or that grows, is restored instead: a buffer that was None or did not exist, and a
    buffer with ``persistent=False`` that gets another shape.

    Args:
        model: the user's module.
        assigned_names: is replaced by the names of the assigned buffers.
        is_constant: whether a tensor that the step computes is the same in each run.

    Raises:
        RequestError: the new tensor has another shape or dtype, and is no such table.
    """
    before = [(name, module, dict(module._buffers)) for name, module in model.named_modules()]
    assigned_names.clear()
    yield
    written: list[tuple[Tensor, Tensor]] = []
    for name, module, buffers in before:
        for key, assigned in list(module._buffers.items()):
            buffer, path = buffers.get(key), f"{name}.{key}" if name else key
            if assigned is buffer:
                continue
            if buffer is not None and isinstance(assigned, Tensor) and have_equal_shapes(assigned, buffer):
                assigned_names.add(path)
                # Before any is written: it may be another buffer's old value.
                written.append((buffer, assigned.detach()))
            elif buffer is not None or holds_captured(assigned):
                table = buffer is None or key in module._non_persistent_buffers_set
                if not (table and is_constant(assigned)):
                    raise _shape_refusal(path, buffer, assigned)
            if key in buffers:
                module._buffers[key] = buffer
            elif holds_captured(assigned):
                del module._buffers[key]
                module._non_persistent_buffers_set.discard(key)
    for buffer, value in written:
        buffer.copy_(value)


def _shape_refusal(path: str, buffer: Tensor | None, assigned: Any) -> RequestError:
    what = f"{assigned.dtype} {tuple(assigned.shape)}" if isinstance(assigned, Tensor) else repr(assigned)
    if buffer is None:
        return RequestError(
            f"the step assigns {what} to buffer '{path}', which is None before, and later steps read it: create it "
            "when the model is built"
        )
    return RequestError(
        f"the step assigns {what} to buffer '{path}', which is {buffer.dtype} {tuple(buffer.shape)}: a buffer keeps "
        "its shape and dtype; allocate it large enough, or register a table that grows with persistent=False"
    )
