"""Computes the mean over microbatches by the same operations on every device, so that it has the same bits."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.capture.values.containers import plain_result


def mean_loss(
    losses: Iterable[Tensor], weights: Iterable[Any], weighted: bool, as_numbers: bool = False
) -> tuple[Tensor, Any]:
    """The mean of a batch's losses, summed in their own dtype, microbatch by microbatch.

    Args:
        losses: of each microbatch, without a gradient.
        weights: of each: a number or a tensor.
        weighted: whether the step returned the weights; otherwise they are shares of the batch, whose sum is 1.
        as_numbers: whether weights that are tensors count as Python numbers, which do not change the dtype of a loss.

    Returns:
        The mean, and the sum of the weights.
    """
    total, sum_of_weights = None, 0.0
    for loss, weight in zip(losses, weights, strict=True):
        part = _applied(torch.mul, loss, weight, as_numbers)
        total = part if total is None else total + part
        sum_of_weights = sum_of_weights + weight
    assert total is not None
    return _applied(torch.div, total, sum_of_weights, as_numbers) if weighted else total, sum_of_weights


def _applied(operator: Callable[[Tensor, Any], Tensor], loss: Tensor, weight: Any, as_numbers: bool) -> Tensor:
    if not as_numbers or not isinstance(weight, Tensor):
        return operator(loss, weight)
    wide = torch.promote_types(loss.dtype, torch.float32)  # in which torch computes with a number
    return operator(loss.to(wide), weight.to(wide)).to(loss.dtype)


def loss_and_weight(result: Any) -> tuple[Any, Any]:
    """The loss that a step returns, and its own weight or None."""
    result = plain_result(result)
    if not isinstance(result, tuple | list):
        return result, None
    parts = [part for part in result if not isinstance(part, dict)]
    return (parts[0], parts[1]) if len(parts) > 1 else (parts[0], None)
