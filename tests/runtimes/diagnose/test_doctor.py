"""The checks of a model: which plans run, what counts as right, and parts that cannot be cut."""

import itertools

import pytest
import torch
from panpipe.runtimes.diagnose.doctor import (
    TOLERANCES,
    CheckedModel,
    uncut_operators,
)
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape")  # one of its batches


def step(model, batch):
    return model(batch).pow(2).mean()


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), *more)


@pytest.fixture(scope="module")
def checked():
    return CheckedModel(network(), step, torch.randn(6, 4), 3)


class Unrolled(nn.Module):
    """Writes a tensor in place again and again: no cut can divide it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        made = torch.zeros_like(x)
        for column in range(4):
            made[:, column] = self.linear(x)[:, column]  # WRITES
        return made


def test_large_parts_that_cannot_be_cut_have_the_line_that_writes():
    found = uncut_operators(CheckedModel(network(Unrolled()), step, torch.randn(6, 4), 3).operators)
    assert found
    assert 0.1 < found[0].share < 1
    assert "test_doctor.py" in found[0].line
    assert not uncut_operators(CheckedModel(network(), step, torch.randn(6, 4), 3).operators)


@pytest.mark.parametrize("source", [itertools.count(1), itertools.cycle([1.0, 1.0, 1.0, 2.0])], ids=["count", "cycle"])
def test_a_step_that_computes_something_else_each_time_is_found(source):
    model = network()
    checked = CheckedModel(model, lambda m, x: m(x).square().mean() * next(source), torch.randn(6, 4), 3)
    assert not checked_right(checked.check(ThreadTeam(2), "1f1b", 1))


def test_a_table_of_the_first_length_is_found():
    class Scaled(nn.Module):
        scale = None

        def forward(self, x):
            if self.scale is None:
                self.scale = torch.tensor(float(len(x)))
            return x * self.scale

    checked = CheckedModel(network(Scaled()), step, torch.randn(6, 4), 3)
    assert not checked_right(checked.check(ThreadTeam(2), "1f1b", 1))


def checked_right(check):
    assert check.distance is not None, check.problem
    return check.distance.within(*TOLERANCES[torch.float64])
