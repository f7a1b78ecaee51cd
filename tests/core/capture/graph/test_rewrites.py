"""Operators that are taken apart or written otherwise before a step is cut: the same numbers, in every bit."""

import pytest
import torch
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn

WIDTH, LENGTH = 6, 5
pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape")  # the doctor trains other sizes, too


class Recurrent(nn.Module):
    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, **options)
        self.head = nn.Linear(options.get("proj_size", WIDTH) * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x):
        out, ends = self.recurrent(x)
        ends = ends[0] if isinstance(ends, tuple) else ends
        return self.head(out).mean() + ends.pow(2).mean()


class Scattering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(x.masked_scatter(x > 0, self.source(x).flatten())).mean()


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        torch._check(x[x > -9].numel() == x.numel(), lambda: "too small")
        return self.second(self.first(x)).mean()


def step(model, x):
    return model(x)


def batch():
    return torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=3, dropout=0.3, batch_first=True),
    "lstm both ways": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True),
    "lstm with projections": lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=4, batch_first=True),
    "lstm without biases, times first": lambda: Recurrent(nn.LSTM, num_layers=2, bias=False),
    "gru": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3, batch_first=True),
    "rnn": lambda: Recurrent(nn.RNN, num_layers=2, dropout=0.3, nonlinearity="relu", batch_first=True),
    "masked scatter": Scattering,
    "an assertion": Asserting,
}


SLOW = ("lstm", "lstm without biases, times first", "lstm with projections", "gru")
"""Variations of others, left out of the fast suite."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_rewritten_operators_train_like_one_process(name):
    torch.manual_seed(0)
    dims = 1 if "times first" in name else "auto"
    checked = CheckedModel(MODELS[name]().train(), step, batch(), 2, batch_dims=dims)
    check = checked.check(ThreadTeam(2), "zb-h1", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check
