"""Which operator saves a storage first, what microbatches share, and what replaces what is computed again."""

import torch
from panpipe.core.analytic.saved_storages import saved_storages
from panpipe.core.analytic.single_operator import LoneOperator
from panpipe.core.analytic.work import work_of
from torch import nn

from ...support.stages.graphs import operators

ROWS, WIDTH, WORDS = 8, 16, 4096


def saved(model, batch, step=lambda model, batch: model(batch).square().mean()):
    """By operator: (bytes, shared) of what it is the first to save."""
    lone = [LoneOperator(found, node.name) for found in [operators(model, step, batch)] for node in found.graph.nodes]
    return {
        operator.name: [(each.bytes, each.shared) for each in own]
        for operator, own in zip(lone, saved_storages(lone, [work_of(operator) for operator in lone]), strict=True)
    }


def test_a_storage_is_saved_once_by_the_first_operator_that_needs_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            x = self.one(x)
            return self.two(x) + self.three(x)

    found = saved(Net(), torch.ones(ROWS, WIDTH))
    assert found["one/linear"] == []  # of the batch
    assert found["two/linear"] == [(ROWS * WIDTH * 4, False)]
    assert found["three/linear"] == []
    assert sum(map(len, found.values())) == 2  # and the sum, for its square


def test_the_log_softmax_of_narrow_logits_is_computed_again_from_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16)

        def forward(self, x):
            return self.head(x.bfloat16())

    def step(model, batch):
        return nn.functional.cross_entropy(model(batch).float(), torch.zeros(len(batch), dtype=torch.long))

    found = saved(Net(), torch.ones(64, WIDTH), step)
    sizes = [size for own in found.values() for size, _ in own]
    assert 64 * WORDS * 2 in sizes  # bfloat16
    assert 64 * WORDS * 4 not in sizes


def test_a_cast_weight_is_shared_by_all_microbatches():
    def step(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.sin()).float().square().mean()

    found = saved(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.ones(ROWS, WIDTH), step)
    assert (WIDTH * WIDTH * 2, True) in [each for own in found.values() for each in own]
