"""Calls that a captured step cannot have: refused with the line and what to do, also by the default call."""

import panpipe
import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

from ....laws.programs import names_a_line


class Chooses(nn.Module):
    """A network with a branch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.first(x),)))


def cond(path):
    return Chooses(), lambda m, b: m(b["x"]).square().mean()


def load(path):
    torch.save(torch.ones(4), path)
    return nn.Linear(4, 4), lambda m, b: F.mse_loss(m(b["x"]), torch.load(path).expand(len(b["x"]), 4))


def communicate(path):
    def step(m, b):
        torch.distributed.broadcast(torch.randperm(2), src=0)
        return m(b["x"]).square().mean()

    return nn.Linear(4, 4), step


def pipeline(model, step, batch):
    panpipe.pipeline(model, step, batch, optimizer=torch.optim.SGD, microbatches=2)


@pytest.mark.parametrize("door", [pipeline, capture_step])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (cond, r"torch\.where"),
        (load, "register what it holds as a buffer"),
        (communicate, "communicates with other processes"),
    ],
)
def test_call_is_refused_with_its_line_and_the_fix(make, said, door, tmp_path):
    with pytest.raises(RequestError, match=said) as refusal:
        door(*make(tmp_path / "weights.pt"), {"x": torch.randn(4, 4)})
    assert names_a_line(str(refusal.value), __file__)
