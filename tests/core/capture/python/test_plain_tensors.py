"""A module that asks for a plain tensor stays Python, and the rest of its step is captured, whatever it does."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn

WIDTH = 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the loss does not depend on it",
    "ignore:microbatches of a new shape",  # the doctor trains other sizes, too
    "ignore:.*so this is shown once, now",
)


class Particular(nn.Module):
    """Wants a plain tensor, which a captured one is not."""

    def forward(self, x):
        assert type(x) is torch.Tensor
        return x.tanh()


class Tripled(torch.autograd.Function):
    """The identity, with three times the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Model(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.before, self.particular, self.after = nn.Linear(WIDTH, WIDTH), Particular(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.run = run

    def forward(self, x):
        return self.after(self.run(self, self.particular(self.before(x))))


def plain(model, x):
    model.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x + model.seen


def hooked(model, x):
    y = x.sin()
    y.register_hook(lambda gradient: 3 * gradient)
    return y + x


def assigned(model, x):
    model.seen = 0.9 * model.seen + 0.1 * x.detach().mean(0)
    return x + model.seen


def printing(model, x):
    print("mean", x.mean(), f"{x.amax().item():.3f}")
    return x


def early(model, x):
    return x * x.mean().item()


def step(model, x):
    return model(x).pow(2).mean()


def numbering(model, x):
    loss = model(x).pow(2).mean()
    return loss, {"loss": loss.item()}


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


CASES = {
    "a buffer written in place": (plain, step, ["particular"]),
    "an autograd function": (lambda model, x: Tripled.apply(x), step, ["particular"]),
    "a hook on a gradient": (hooked, step, ["particular"]),
    "a buffer assigned anew": (assigned, step, ["particular"]),
    "a print": (printing, step, ["particular"]),
    "a number": (early, step, ["particular"]),
    "a number returned": (lambda model, x: x, numbering, ["particular"]),
}


@pytest.mark.parametrize("case", CASES)
def test_step_around_it_trains_like_one_process(case):
    run, train, regions = CASES[case]
    torch.manual_seed(0)
    checked = CheckedModel(Model(run).train(), train, batch(), 3)
    assert list(checked.operators.step.regions) == regions
    check = checked.check(ThreadTeam(2), "1f1b", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check


def test_assigned_data_is_refused_with_the_line():
    def exchanged(model, x):
        model.seen.data = model.seen.data * 0.9 + x.detach().mean(0)
        return x + model.seen

    with pytest.raises(RequestError, match=r"test_plain_tensors\.py:\d+ in exchanged: the step assigns \.data"):
        capture_step(Model(exchanged), step, batch(2))
