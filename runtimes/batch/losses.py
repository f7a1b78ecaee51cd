"""Computes the mean over microbatches by the same operations on every device, so that it has the same bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def mean_loss(losses: Iterable[Tensor], weights: Iterable[Any], weighted: bool) -> tuple[Tensor, Any]:
    """The mean of a batch's losses, summed in their own dtype, microbatch by microbatch.

    Args:
        losses: of each microbatch, without a gradient.
        weights: of each: a number or a tensor.
        weighted: whether the step returned the weights; otherwise they are shares of the batch, whose sum is 1.

    Returns:
        The mean, and the sum of the weights.
    """
    total, sum_of_weights = None, 0.0
    for loss, weight in zip(losses, weights, strict=True):
        part = loss * weight
        total = part if total is None else total + part
        sum_of_weights = sum_of_weights + weight
    assert total is not None
    return total / sum_of_weights if weighted else total, sum_of_weights
