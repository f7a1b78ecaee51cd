"""What users do with gradients between steps: those that wait for an update and are cleared are refused."""

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.microbatches import split_batch
from torch import nn
from torch.nn import functional as F

from ...laws.programs import WIDTH, sgd, vectors
from ...support.cuts import even_plan

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
