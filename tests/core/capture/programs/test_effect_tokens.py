"""Operators with an effect: error checks of linear algebra run, and raise, in a stage's programs."""

import pytest
import torch
from panpipe.runtimes.diagnose.doctor import TOLERANCES, CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape")  # the doctor trains other sizes, too


class Solved(nn.Module):
    """Solves with a matrix of its own, with an inverse and with a Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        matrix = self.scale * torch.eye(6, dtype=x.dtype) + h.T @ h
        factor = torch.linalg.cholesky(matrix)
        h = torch.linalg.solve(matrix, h.T).T @ torch.linalg.inv(matrix)
        return self.last(h) + factor.diagonal().log().sum()


def step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


@pytest.fixture(scope="module")
def checked():
    torch.manual_seed(0)
    return CheckedModel(Solved(), step, torch.randn(4, 6), 2)


def test_linear_solves_train_like_one_process(checked):
    team = ThreadTeam(2)
    check = checked.check(team, "1f1b", 1)
    team.close()
    assert check.distance is not None, check.problem
    assert check.distance.within(*TOLERANCES[torch.float64]), check.distance


def test_singular_matrix_raises_as_in_one_process(checked):
    model = checked.model
    team = ThreadTeam(2)
    with torch.no_grad():
        model.scale.zero_()
        model.first.weight.zero_()
        model.first.bias.zero_()
    check = checked.check(team, "1f1b", 1)
    team.close()
    assert check.distance is None
    assert "linalg.cholesky" in check.problem
