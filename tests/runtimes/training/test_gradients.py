"""Gradients between steps: those that wait, those whose value is elsewhere."""

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.training.state import PARTS, SLICE, SharedGradient
from torch import nn
from torch.nn import functional as F

from ...laws.programs import WIDTH, sgd, vectors
from ...support.cuts import even_plan

# What users do with gradients between steps: those that wait for an update and are cleared are refused.


GENERATOR = torch.Generator().manual_seed(7)
BATCHES = [vectors(4, GENERATOR) for _ in range(4)]


class Tied(nn.Module):
    """Two layers with one weight, on two stages."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


def fit(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def made():
    torch.manual_seed(0)
    return Tied().double()


@pytest.fixture
def pipe():
    operators = operators_of(capture_step(made(), fit, split_batch(BATCHES[0], 2)[0].batch))
    with panpipe.pipeline(
        made(),
        fit,
        BATCHES[0],
        optimizer=sgd,
        microbatches=2,
        plan=even_plan(operators, 2, 2),
        run=panpipe.Run(progress=False),
    ) as pipe:
        yield pipe


CLEARED = {
    "the model": lambda pipe: pipe._session.model.zero_grad(),
    "the model, to zero": lambda pipe: pipe._session.model.zero_grad(set_to_none=False),
    "optimizers": lambda pipe: [optimizer.zero_grad() for optimizer in pipe.optimizers.values()],
}


@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED)
def test_clearing_accumulated_gradients_is_refused(pipe, clear):
    pipe.step(BATCHES[0], update=False)
    clear(pipe)
    with pytest.raises(RequestError, match=r"zero_grad\(\) cleared the gradients that step\(batch, update=False\) had"):
        pipe.step(BATCHES[1])


def test_gradients_after_an_update_may_be_cleared_and_accumulated_ones_changed(pipe):
    model = made()
    optimizer = sgd(list(model.named_parameters()))
    for first, second in ((0, 1), (2, 3)):
        pipe.step(BATCHES[first], update=False)
        pipe._session.model.first.bias.grad.mul_(0.5)
        pipe.step(BATCHES[second])
        for clear in CLEARED.values():
            clear(pipe)
        optimizer.zero_grad()
        for number, factor in ((first, 0.5), (second, 1.0)):
            (fit(model, BATCHES[number]) / 2).backward()
            model.first.bias.grad.mul_(factor)
        optimizer.step()
    for mine, wanted in zip(pipe._session.model.parameters(), model.parameters(), strict=True):
        assert (mine - wanted).abs().max() < 1e-12


# The ``grad`` whose value is not here: its shape may be read, its value may not.


@pytest.fixture
def model():
    made = nn.Linear(3, 2)
    for name, parameter in made.named_parameters():
        parameter.grad = SharedGradient.of(parameter, name)
    return made


READS = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "mul_": lambda model: model.weight.grad.mul_(2),
    "__getitem__": lambda model: model.weight.grad[0],
    "data": lambda model: model.weight.grad.data,
    "add": lambda model: torch.ones(2, 3) + model.weight.grad,
    "cat": lambda model: torch.cat([torch.ones(3), model.bias.grad]),
    "add_": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step(),
    "tolist": lambda model: model.weight.grad.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_any_use_of_the_value_is_refused_with_the_name_and_what_to_do(model, name):
    with pytest.raises(RequestError, match=r"of the gradient of '(weight|bias)', which waits for an update") as raised:
        READS[name](model)
    assert str(raised.value).endswith(f"{PARTS}, or use Update(clip_norm=) to clip all of them")


def test_a_slice_says_where_its_gradient_can_be_read():
    weight = nn.Linear(3, 2).weight
    with pytest.raises(RequestError, match="read or change that of the parameter in the model"):
        SharedGradient.of(weight, "weight", SLICE).sum()
