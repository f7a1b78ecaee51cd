"""Losses of torch that select rows by the values of their targets, computed densely, for traces without values.

`AdaptiveLogSoftmaxWithLoss` selects the rows of each cluster of classes and raises an error unless every row belongs to
one. A trace on fake tensors selects placeholders, which fail this check.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.nn.modules.adaptive import _ASMoutput


@contextmanager
def dense_losses() -> Iterator[None]:
    """Within this context these losses compute the same from the scores of all classes."""
    with mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _all_clusters):
        yield


def _all_clusters(loss: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """Of rows, or of a single sample without dimension of rows, as ``forward``."""
    rows, targets = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    output = loss.log_prob(rows).gather(1, targets.unsqueeze(1)).squeeze(1)
    mean = (-output).mean()
    return _ASMoutput(output if target_.dim() else output.squeeze(0), mean)
