"""Results of steps that are objects or dicts with a loss, such as the outputs of transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def plain_result(result: Any) -> Any:
    """A step's result with an object or dict that has a ``loss`` replaced by the loss and its other scalars as metrics.

    Tensors with several elements, such as logits, are not part of a step's result. Other results are unchanged.

    Args:
        result: what a step returned.
    """
    fields = _fields(result)
    if fields.get("loss") is None:
        return result
    metrics = {str(name): value for name, value in fields.items() if name != "loss" and _is_scalar(value)}
    return (fields["loss"], metrics) if metrics else fields["loss"]


def _fields(result: Any) -> Mapping[Any, Any]:
    if isinstance(result, Mapping):
        return result
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name, None) for field in dataclasses.fields(result)}
    named = getattr(result, "_fields", None)
    return dict(zip(named, result, strict=True)) if isinstance(result, tuple) and named is not None else {}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
