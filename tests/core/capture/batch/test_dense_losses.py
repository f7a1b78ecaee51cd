"""Losses that select rows by values, computed densely: the same results, and the original forward afterwards."""

import pytest
import torch
from panpipe.core.capture.batch.dense_losses import dense_losses
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


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


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss_has_the_shape_of_torchs_without_the_values_of_lengths(reduction):
    scores, targets = torch.randn(9, 4, 5).log_softmax(-1), torch.randint(1, 5, (4, 3))
    given = scores, targets, torch.full((4,), 9), torch.full((4,), 3)
    wanted = nn.CTCLoss(reduction=reduction)(*given)
    own = nn.functional.ctc_loss
    with dense_losses(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = nn.CTCLoss(reduction=reduction)(*map(mode.from_tensor, given))
    assert found.shape == wanted.shape
    assert nn.functional.ctc_loss is own
    in_one_dimension = scores, targets.flatten(), *given[2:]  # without rows: torch's own loss
    wanted = nn.CTCLoss()(*in_one_dimension)
    with dense_losses():
        assert torch.equal(nn.CTCLoss()(*in_one_dimension), wanted)
