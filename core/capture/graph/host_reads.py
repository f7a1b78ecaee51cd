"""Operators with which a CUDA device makes the host wait for a value: a captured graph cannot contain them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_CHECKED = {aten._linalg_check_errors.default, aten._ctc_loss.Tensor, aten._pack_padded_sequence.default}
"""Operators that read an error code or lengths."""
_INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def host_read(nodes: Iterable[fx.Node]) -> str | None:
    """What the first of some nodes reads on the host, in words; None if none does.

    Args:
        nodes: of a functional graph, with their fake results in ``meta``.
    """
    for node in nodes:
        values = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        if reads_on_host(node.target, values[0], values[1]):
            masked = node.target in _INDEXED
            return f"{node.target}{' with a boolean mask' if masked else ''}"
    return None


def reads_on_host(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operator reads a value on the host, on a CUDA device.

    Args:
        target: the operator.
        args, kwargs: its arguments.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _INDEXED:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return target in _CHECKED or not _TAGS.isdisjoint(target.tags)
