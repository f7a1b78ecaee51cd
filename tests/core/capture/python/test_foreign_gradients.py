"""Tensors outside of the model that require a gradient: refused where an optimizer has them, and otherwise reported."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

from ....laws.programs import names_a_line


class Centres(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(4, 4))

    def forward(self, features, labels):
        return (features - self.centres[labels]).square().mean()


def capture(step):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return capture_step(model, step, {"x": torch.randn(2, 4), "y": torch.randint(0, 4, (2,))})


def test_criterion_with_parameters_that_an_optimizer_has_is_refused_with_the_line():
    criterion = Centres()
    optimizer = torch.optim.SGD(criterion.parameters())
    with pytest.raises(RequestError, match=r"'criterion.centres', which requires a gradient and is no") as refusal:
        capture(lambda m, b: criterion(m(b["x"]), b["y"]))
    assert names_a_line(str(refusal.value), __file__)
    assert optimizer.param_groups


def test_weights_of_losses_in_a_list_that_an_optimizer_has_are_refused():
    weights = [nn.Parameter(torch.zeros(())) for _ in range(2)]
    optimizer = torch.optim.SGD(weights)
    with pytest.raises(RequestError, match=r"reads 'weights\[0\]'"):
        capture(lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) * weights[0].exp() + weights[1])
    assert optimizer.param_groups


def test_criterion_with_parameters_without_an_optimizer_is_reported():
    criterion = Centres()
    with pytest.warns(UserWarning, match="a pipeline gives it none"):
        capture(lambda m, b: criterion(m(b["x"]), b["y"]))


@pytest.mark.parametrize("how", ["detached", "no_grad", "metric"])
def test_network_outside_of_the_model_whose_result_gets_no_gradient_is_captured(how, recwarn):
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters())

    def step(m, b):
        with torch.set_grad_enabled(how != "no_grad"):
            found = other(b["x"])
        loss = F.cross_entropy(m(b["x"]), b["y"])
        if how == "metric":
            return loss, {"distance": found.square().mean()}
        return loss + F.mse_loss(m(b["x"]), found.detach())

    assert capture(step).outputs.loss
    assert not [warning for warning in recwarn if "requires a gradient" in str(warning.message)]
    assert optimizer.param_groups
