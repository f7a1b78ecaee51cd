"""Conditions that only raise an error are left out of a captured step; others are not.

PYTEST_DONT_REWRITE: the assertions below are captured as Python has them.
"""

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence


def asserts(x: Tensor) -> None:
    assert x.isfinite().all(), "not finite"


def raises_on_maximum(x: Tensor) -> None:
    if x is not None and x.max() > 1e3:
        raise ValueError(f"too large: {x.max()}")


def compares_a_number(x: Tensor) -> None:
    assert x.abs().max().item() < 1e3


def any_of_several(x: Tensor) -> None:
    if any([torch.isnan(x).any(), torch.isinf(x).any()]):
        raise RuntimeError


def asserts_by_torch(x: Tensor) -> None:
    if (x > 1e3).any():
        largest = x.max().tolist()
        torch._assert(False, f"too large: {largest}")


def either(x: Tensor) -> None:
    if torch.isnan(x).any() or torch.isinf(x).any():
        raise RuntimeError


CHECKS = (asserts, raises_on_maximum, compares_a_number, any_of_several, asserts_by_torch, either)


class Checked(nn.Module):
    def __init__(self, check) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.check(h)
        return self.last(h if found is None else found)


def captured(model: nn.Module, step=lambda model, x: model(x).mean()):
    return capture_step(model, step, torch.ones(3, 4))


@pytest.mark.parametrize("check", CHECKS)
def test_check_of_values_is_skipped_with_a_warning_at_its_line(check):
    with pytest.warns(UserWarning, match="this check needs the value") as warned:
        step = captured(Checked(check))
    assert not step.regions
    assert {w.filename for w in warned} == {__file__}
    assert len(operators_of(step).graph.nodes) == 3


def test_distributions_are_captured_without_their_argument_checks():
    def step(model, x):
        logits = model.first(x)
        drawn = Normal(logits, logits.exp()).rsample()
        chosen = Categorical(logits=logits)
        divergence = kl_divergence(Normal(logits, 1.0), Normal(0.0, 1.0)).mean()
        return model.last(drawn).mean() - chosen.log_prob(x[:, 0].long()).mean() - chosen.entropy().mean() + divergence

    assert not captured(Checked(lambda _: None), step).regions


def fails_whatever_bools_are(x: Tensor) -> None:
    assert x.isfinite().all()
    if (x > 1e3).any():
        raise ValueError("too large")


@pytest.mark.filterwarnings("ignore:this check needs the value")
@pytest.mark.parametrize("function", [find_batch_dims, capture_step])
def test_handler_around_the_call_of_panpipe_is_ignored(function):
    model = Checked(fails_whatever_bools_are)
    try:
        function(model, lambda model, batch: model(batch["x"]).mean(), {"x": torch.randn(6, 4)})
    except RequestError as error:
        pytest.fail(str(error))
