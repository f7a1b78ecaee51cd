"""Operators accept any positions and probabilities inside, and compute as usual otherwise."""

import pytest
import torch
from panpipe.runtimes.programs.valid_values import ValidValues
from torch.nn import functional as F

WRONG = torch.tensor([[-7, 1 << 40, 3]])
TABLE = torch.arange(8.0).view(1, 8)
MASK = torch.tensor([[True] + [False] * 7])


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (lambda: TABLE.gather(1, WRONG), torch.zeros(1, 3)),
        (lambda: TABLE[0][WRONG], torch.zeros(1, 3)),
        (lambda: TABLE.index_select(1, WRONG[0]), torch.zeros(1, 3)),
        (lambda: F.embedding(WRONG, TABLE.t()), torch.zeros(1, 3, 1)),
        (lambda: torch.zeros(1, 4).scatter_add(1, WRONG, torch.ones(1, 3)), torch.tensor([[3.0, 0, 0, 0]])),
        (lambda: torch.zeros(4).index_put((WRONG[0],), torch.tensor(2.0)), torch.tensor([2.0, 0, 0, 0])),
        (lambda: torch.zeros(4).index_add_(0, WRONG[0], torch.ones(3)), torch.tensor([3.0, 0, 0, 0])),
        (lambda: F.nll_loss(TABLE, WRONG[:, 0]), torch.tensor(0.0)),
        (lambda: torch.multinomial(torch.zeros(1, 1), 1), torch.tensor([[0]])),
        (lambda: torch._assert_async(torch.tensor(False)), None),
        (lambda: TABLE[MASK], torch.zeros(1)),
        (lambda: F.mse_loss(TABLE, TABLE + 2), torch.tensor(4.0)),
    ],
)  # fmt: skip
def test_positions_and_probabilities_are_valid(run, wanted):
    with ValidValues():
        found = run()
    assert found is None if wanted is None else torch.equal(found, wanted)
