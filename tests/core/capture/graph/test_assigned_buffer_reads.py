"""Buffers that a forward assigns before or after it reads them, with the numbers of eager PyTorch."""

import pytest
import torch
from torch import Tensor, nn

from ....support.by_stages import compare

WIDTH = 4


class Between(nn.Module):
    """A use of two buffers between two linear layers."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), use
        self.register_buffer("b", torch.linspace(1, 2, WIDTH))
        self.register_buffer("c", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.first(x)))


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


def read_then_assigned(m, x):
    y = x * m.b
    m.b = mean(x)
    return y


def average(m, x):
    y = x * m.b
    m.b = 0.9 * m.b + 0.1 * mean(x)
    return y


def assigned_then_read(m, x):
    m.b = 0.9 * m.b + 0.1 * mean(x)
    return x * m.b


def assigned_twice(m, x):
    y = x * m.b
    m.b = mean(x)
    z = y * m.b
    m.b = m.b * 2
    return z + m.b


def assigned_then_written(m, x):
    y = x * m.b
    m.b = m.b + 1
    m.b.mul_(mean(x))
    return y + m.b


def without_gradients(m, x):
    y = x * m.b
    with torch.no_grad():
        m.b = m.b * 0.5 + x.mean(0)
    return y


def with_gradients(m, x):
    y = x * m.b
    m.b = m.b + x.mean(0)
    return y * m.b


def counted(m, x):
    y = x * (1 + m.steps)
    m.steps = m.steps + 1
    return y


def kept(m, x):
    old = m.b
    m.b = mean(x)
    return x * old + m.b


def viewed(m, x):
    part = m.b[:2]
    y = x[:, :2] * part
    m.b = m.b.flip(0)
    return torch.cat([y, x[:, 2:] * part], 1)


def exchanged(m, x):
    y = x * m.b * m.c
    m.b, m.c = m.c, m.b
    return y


def shifted(m, x):
    y = x * m.b * m.c
    m.c = m.b
    m.b = mean(x)
    return y


USES = [
    read_then_assigned, average, assigned_then_read, assigned_twice, assigned_then_written, without_gradients,
    with_gradients, counted, kept, viewed, exchanged, shifted,
]  # fmt: skip


def the_step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


SPLIT = {"cuts": 3, "split": True}
OTHERS = [{"cuts": 1}, {"cuts": 2, "recompute": True}]


@pytest.mark.parametrize(
    ("use", "options"),
    [
        *((use, SPLIT) for use in USES),
        *((average, options) for options in OTHERS),
        *(pytest.param(use, o, marks=pytest.mark.slow) for use in USES if use is not average for o in OTHERS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_assigned_buffers_and_gradients_equal_eager(use, options):
    torch.manual_seed(0)
    compare(Between(use).double(), the_step, torch.randn(3, WIDTH, dtype=torch.float64), **options)
