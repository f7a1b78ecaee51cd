"""Means over microbatches: their weights, their bits, and the sum of the weights."""

import torch
from panpipe.runtimes.batch.losses import mean_loss


def losses(*values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype) for value in values]


def test_shares_of_a_batch_are_summed_and_weights_of_the_step_divided_by():
    shares, total = mean_loss(losses(1.0, 3.0), [0.75, 0.25], weighted=False)
    assert (shares.item(), total) == (1.5, 1.0)
    weighted, total = mean_loss(losses(1.0, 3.0), losses(6.0, 2.0), weighted=True)
    assert (weighted.item(), total.item()) == (1.5, 8.0)


def test_sum_is_taken_in_order_and_in_the_losses_own_dtype():
    big, one = 2.0**24, 1.0
    assert mean_loss(losses(big, one, one), [1.0] * 3, weighted=False)[0].item() == big
    assert mean_loss(losses(one, one, big), [1.0] * 3, weighted=False)[0].item() == big + 2
    assert mean_loss(losses(0.5, dtype=torch.bfloat16), [1.0], weighted=False)[0].dtype is torch.bfloat16


def test_batch_without_a_sample_that_counts_has_no_number_as_its_mean():
    assert mean_loss(losses(0.0, 0.0), losses(0.0, 0.0), weighted=True)[0].isnan()
