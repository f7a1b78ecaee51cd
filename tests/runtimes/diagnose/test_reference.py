"""The reference of a pipeline: losses and gradients of microbatches that are computed by hand."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.parity import reference_of_replicas, reference_step
from torch import nn
from torch.amp.grad_scaler import GradScaler

ROWS = {"x": 0}


class Doubled(nn.Module):
    """``2 x``, which sums up what it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum()
        return self.weight * x


def squares(model, batch):
    return model(batch["x"]).square().mean()


def batch_of(*values):
    return {"x": torch.tensor([float(value) for value in values]).unsqueeze(1)}


def run(batch, step=squares, microbatches=2, **options):
    """Loss, gradient and buffer."""
    model = Doubled()
    model.weight.grad = torch.tensor(100.0)  # of an earlier step
    loss = reference_step(model, step, batch, microbatches=microbatches, batch_dims=ROWS, **options)
    return loss.item(), model.weight.grad.item(), model.seen.item()


def test_loss_and_gradient_are_means_over_the_batch():
    # (4 (1 + 4) / 2 + 4 (9 + 16) / 2) / 2
    assert run(batch_of(1, 2, 3, 4)) == (30.0, 30.0, 10.0)


def test_microbatches_of_other_sizes_count_by_their_samples():
    assert run(batch_of(1, 2, 6)) == pytest.approx((4 * 41 / 3, 4 * 41 / 3, 9.0))


def test_batch_of_fewer_samples_becomes_as_many_microbatches():
    calls = []

    def step(model, batch):
        calls.append(len(batch["x"]))
        return squares(model, batch)

    assert run(batch_of(1, 3), step, microbatches=4) == (20.0, 20.0, 4.0)
    assert calls == [1, 1]


def test_weights_of_the_step_replace_the_samples():
    def step(model, batch):
        return squares(model, batch), batch["x"].sum(), {"metric": 1.0}

    # losses 10 and 50 of weights 3 and 7
    assert run(batch_of(1, 2, 3, 4), step) == pytest.approx((38.0, 38.0, 10.0))


def test_weight_passes_no_gradient():
    def step(model, batch):
        return squares(model, batch), model.weight * batch["x"].sum()

    # weights 6 and 14 of losses 10 and 50
    assert run(batch_of(1, 2, 3, 4), step) == pytest.approx((38.0, 38.0, 10.0))


def test_scaler_scales_gradients_and_not_the_loss():
    scaler = GradScaler("cpu", init_scale=4.0)
    assert run(batch_of(1, 2, 3, 4), scaler=scaler) == (30.0, 120.0, 10.0)


def test_replicas_share_the_mean_and_the_buffers_of_the_first_one():
    model = Doubled()
    batches = [batch_of(1, 2), batch_of(3, 4)]
    loss = reference_of_replicas(model, squares, batches, microbatches=2, batch_dims=ROWS)
    assert (loss.item(), model.weight.grad.item(), model.seen.item()) == (30.0, 30.0, 3.0)


def drawn(batches, microbatches, **options):
    """What each microbatch draws."""
    found = []

    def step(model, batch):
        found.append(torch.rand(()).item())
        return squares(model, batch)

    reference_of_replicas(Doubled(), step, batches, microbatches=microbatches, batch_dims=ROWS, **options)
    return found


def test_each_microbatch_step_and_seed_draws_other_numbers():
    whole = drawn([batch_of(1, 2, 3, 4)], 4)
    assert len(set(whole)) == 4
    assert drawn([batch_of(1, 2), batch_of(3, 4)], 2) == whole  # microbatch m of replica r is number 2 r + m
    for other in ({"seed": 1}, {"index": 1}):
        assert not set(drawn([batch_of(1, 2, 3, 4)], 4, **other)) & set(whole)


@pytest.mark.parametrize("result", ["loss", 1.5])
def test_step_without_a_loss_is_refused(result):
    kind = type(result).__name__
    with pytest.raises(RequestError, match=f"the step returns {kind} and no tensor: return a scalar loss"):
        run(batch_of(1, 2), lambda model, batch: result)


def test_a_model_may_have_a_zero_grad_of_its_own():
    class Learner(nn.Linear):
        def zero_grad(self, weights=None):  # as in MAML's Learner
            raise AssertionError("not called")

    model, batch = Learner(2, 1), torch.ones(4, 2)
    first, second = (
        reference_step(model, lambda m, x: m(x).sum(), batch, microbatches=2, batch_dims=0) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))
