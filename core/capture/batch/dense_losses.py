"""Losses of torch that need the values of their targets, replaced by forms that do not, for traces without values.

`AdaptiveLogSoftmaxWithLoss` selects the rows of each cluster of classes and raises an error unless every row belongs to
one. A trace on fake tensors selects placeholders, which fail this check. So it is computed from the scores of all
classes, with the same result. `ctc_loss` reads its lengths. It is replaced by a number for each sample that depends on
all of its scores, targets and lengths, as the loss does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.adaptive import _ASMoutput


@contextmanager
def dense_losses() -> Iterator[None]:
    """Within this context the two losses need no values; see the module."""
    ctc_loss = F.ctc_loss

    def padded(log_probs: Tensor, targets: Tensor, *lengths: Any, **options: Any) -> Tensor:
        if log_probs.ndim == 3 and targets.ndim == 2 and not options.keys() - _CTC:
            return _of_every_sample(log_probs, targets, *lengths, **options)
        return ctc_loss(log_probs, targets, *lengths, **options)

    with (
        mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _all_clusters),
        mock.patch.object(F, "ctc_loss", padded),
    ):
        yield


_CTC = {"input_lengths", "target_lengths", "blank", "reduction", "zero_infinity"}


def _of_every_sample(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """A stand-in for ``ctc_loss`` of log-probabilities of shape (T, N, C) and targets of shape (N, S)."""
    found = log_probs.sum((0, 2)) + targets.sum(1)
    for lengths in (input_lengths, target_lengths):
        found = found / torch.as_tensor(lengths, device=found.device)
    return found if reduction == "none" else found.sum() if reduction == "sum" else found.mean()


def _all_clusters(loss: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """``forward`` of the adaptive softmax, for inputs of shape (N, features) or (features,)."""
    rows, targets = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    output = loss.log_prob(rows).gather(1, targets.unsqueeze(1)).squeeze(1)
    mean = (-output).mean()
    return _ASMoutput(output if target_.dim() else output.squeeze(0), mean)
