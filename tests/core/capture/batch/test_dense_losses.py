"""Losses that select rows by values, computed densely: the same results, and the original forward afterwards."""

import pytest
import torch
from panpipe.core.capture.batch.dense_losses import dense_losses
from torch import nn


@pytest.mark.parametrize("rows", [(7,), ()], ids=["rows", "one sample"])
@pytest.mark.parametrize("options", [{"cutoffs": [3]}, {"cutoffs": [2, 5, 8], "div_value": 2.0, "head_bias": True}])
def test_adaptive_softmax_equals_that_of_torch(rows, options):
    torch.manual_seed(0)
    loss = nn.AdaptiveLogSoftmaxWithLoss(8, 12, **options).double()
    given, targets = torch.randn(*rows, 8, dtype=torch.float64), torch.randint(12, rows)
    wanted = loss(given, targets)
    with dense_losses():
        found = loss(given, targets)
    assert found.output.shape == wanted.output.shape
    torch.testing.assert_close(found.output, wanted.output)
    torch.testing.assert_close(found.loss, wanted.loss)


def test_forward_is_put_back():
    own = nn.AdaptiveLogSoftmaxWithLoss.forward
    with dense_losses():
        assert nn.AdaptiveLogSoftmaxWithLoss.forward is not own
    assert nn.AdaptiveLogSoftmaxWithLoss.forward is own
