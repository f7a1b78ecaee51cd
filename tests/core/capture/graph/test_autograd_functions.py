"""What models do apart from calling operators: own autograd functions, checkpointing, buffers assigned anew."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the loss does not depend on it",
    "ignore:microbatches of a new shape",  # the doctor trains other sizes, too
)


class Reversal(torch.autograd.Function):
    """The identity, whose gradient changes sign."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Split(torch.autograd.Function):
    """Two results, one of them without a gradient, and a count."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * weight, positive, 7

    @staticmethod
    def backward(ctx, gradient, _positive, _count):
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, (gradient * x).sum(0)


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self, middle) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.calls = 0
        self.middle = middle

    def forward(self, x):
        return self.after(self.middle(self, self.before(x)).tanh()).relu()


def split(model, x):
    y, positive, count = Split.apply(x, model.weight)
    return torch.where(positive, y, y / count)


def remembering(model, x):
    model.seen = 0.9 * model.seen + x.detach().mean(0)
    return x + model.seen


def step(model, x):
    return model(x).pow(2).mean()


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def averaged(model, x):
    with torch.no_grad():
        model.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        target = model.before(x).detach() * model.seen
    return x + (x - target).sigmoid()


def hooked(model, x):
    y = x * model.weight
    y.register_hook(lambda gradient: 3 * gradient)
    return y.sin() + y


MIDDLES = {
    "no_grad, and a buffer written in it": averaged,
    "a hook on a gradient": hooked,
    "vmap": lambda model, x: torch.vmap(lambda row: row * model.weight)(x),
    "gradients of samples by torch.func": lambda model, x: torch.func.vmap(
        torch.func.grad(lambda weight, row: (row * weight).sin().square().sum()), (None, 0)
    )(model.weight, x),
    "a function of one result": lambda model, x: Reversal.apply(x, 0.5),
    "a function of several": split,
    "checkpointing": lambda model, x: checkpoint(lambda y: F.dropout(y * model.weight, 0.3), x, use_reentrant=False),
    "reentrant checkpointing": lambda model, x: checkpoint(lambda y: (y * model.weight).sin(), x, use_reentrant=True),
    "a buffer assigned anew": remembering,
}


def equals_one_process(checked, near=1e-12):
    """It trains by a plan with split backwards and two stages a device."""
    check = checked.check(ThreadTeam(2), "v-half", 2)
    assert check.distance is not None, check
    assert check.distance.within(near, near), check


@pytest.mark.parametrize("middle", MIDDLES)
def test_autograd_functions_train_like_one_process(middle):
    torch.manual_seed(0)
    equals_one_process(CheckedModel(Model(MIDDLES[middle]).train(), step, batch(), 3))


def test_a_function_that_writes_its_input_is_refused_by_name():
    with pytest.raises(RequestError, match=r"functions\.py:\d+: autograd function Writing changes its input.*tensor"):
        capture_step(Model(lambda model, x: Writing.apply(x)), step, batch(2))


class Reversible(torch.autograd.Function):
    """Runs a module again in its backward, which adds to the gradients of the parameters itself."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module, ctx.x = module, x
        return module(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(gradient)
        return x.grad, None


def test_a_function_that_takes_a_module_with_parameters_is_refused_by_name():
    layer = nn.Linear(8, 8)

    def middle(model, x):
        return Reversible.apply(x, layer)

    with pytest.raises(RequestError, match=r"functions\.py:\d+.*autograd function Reversible takes a module"):
        capture_step(Model(middle), step, batch(2))


class Force(nn.Module):
    """Minus the gradient of an energy: differentiates in its forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_module_that_calls_autograd_becomes_an_untraced_region():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Force(), nn.Linear(WIDTH, WIDTH))
    checked = CheckedModel(model, step, batch(), 3)
    assert list(checked.operators.step.regions) == ["1"]
    check = checked.check(ThreadTeam(2), "1f1b", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check


def test_step_that_calls_autograd_is_refused_with_the_line():
    def penalised(model, x):
        x = x.clone().requires_grad_()
        out = model(x)
        return out.mean() + torch.autograd.grad(out.sum(), x, create_graph=True)[0].norm()

    with pytest.raises(
        RequestError, match=r"test_autograd_functions\.py:\d+ in penalised: the step differentiates here"
    ):
        capture_step(Model(lambda model, x: x), penalised, batch(2))


def test_a_parameter_written_in_the_forward_is_refused_by_name():
    def clamped(model, x):
        with torch.no_grad():
            model.weight.mul_(0.5)
        return x * model.weight

    with pytest.raises(
        RequestError, match=r"test_autograd_functions\.py:\d+: the step writes parameter 'weight' in place"
    ):
        capture_step(Model(clamped), step, batch(2))
