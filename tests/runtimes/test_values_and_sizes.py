"""Steps whose way depends on random numbers and on values, outside of every module: equal to eager PyTorch."""

from pathlib import Path

import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.diagnose.parity import distance_to_one_process
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.update.optimizers import OptimizerFactory
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.weights import weights_from
from torch import nn
from torch.nn import functional as F

from ..laws.programs import sgd
from ..support.cuts import even_plan
from ..support.registry import Registry

WIDTH, ROWS, MICROBATCHES = 4, 8, 2
right = Registry()
OPTIMIZER: OptimizerFactory = sgd


def vectors():
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": drawn[0], "y": drawn[1]}


def blocks():
    model = nn.Module()
    model.first = nn.Linear(WIDTH, WIDTH)
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return model.double()


@right
def layers_skipped_at_random():
    def step(m, b):
        x = m.first(b["x"])
        for block in m.blocks:
            if torch.rand(()).item() < 0.5:
                continue
            x = x + torch.tanh(block(x))
        return F.mse_loss(x, b["y"])

    return blocks(), step, vectors()


@right
def layers_with_dropout_skipped_at_random():
    def step(m, b):
        x = m.first(b["x"])
        for block in m.blocks:
            if torch.rand(()) < 0.5:
                x = x + F.dropout(torch.tanh(block(x)), 0.3)
        return F.mse_loss(x, b["y"])

    return blocks(), step, vectors()


@right
def sequences_packed_by_the_step():
    model = nn.Module()
    model.first, model.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def step(m, b):
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.tanh(m.first(b["x"])), b["lengths"], batch_first=True, enforce_sorted=False
        )
        return m.last(m.recurrent(packed)[1][0][-1]).square().mean()

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64, generator=generator)
    return model.double(), step, {"x": x, "lengths": torch.arange(ROWS) % 5 + 1}


@right
def queue_whose_length_the_microbatches_divide():
    model = nn.Module()
    model.query, model.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model.register_buffer("queue", torch.randn(WIDTH, 2 * ROWS))
    model.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def step(m, b):
        query, key = m.query(b["x"]), m.key(b["x"]).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ m.queue.clone()], 1)
        at = int(m.pointer)
        m.queue[:, at : at + len(key)] = key.T
        m.pointer[0] = (at + len(key)) % m.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return model.double(), step, vectors()


class Routed(nn.Module):
    """Experts that get the rows that are sent to them; what balances them is an attribute, as in many libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.balance, self.calls = 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        chosen, out = shares.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, shares[rows, number, None] * expert(x[rows]))
        self.balance = shares.mean(0).square().sum()
        self.calls += 1
        return out


def routed():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), nn.Linear(WIDTH, WIDTH)).double()


@right
def loss_that_a_module_with_values_leaves_in_an_attribute():
    return routed(), lambda m, b: F.mse_loss(m(b["x"]), b["y"]) + 0.1 * m[1].balance, vectors()


@right
def meter_that_a_step_updates():
    class Meter:
        def __init__(self) -> None:
            self.total, self.count = 0.0, 0

        def update(self, value: float, count: int) -> None:
            self.total += value * count
            self.count += count

    meter, model = Meter(), routed()

    def step(m, b):
        loss = F.mse_loss(m(b["x"]), b["y"])
        meter.update(loss.item(), len(b["x"]))
        return loss

    return model, step, vectors()


def test_a_list_that_a_module_with_values_fills_for_the_step_is_refused_with_its_line():
    class Listing(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.losses = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.losses.append(self.balance)
            return out

    def step(m, b):
        m[1].losses.clear()
        return F.mse_loss(m(b["x"]), b["y"]) + sum(m[1].losses)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Listing()).double()
    with pytest.raises(RequestError, match=rf"{Path(__file__).name}:\d+ in forward: module '1' .*attribute 'losses'"):
        capture_step(model, step, vectors())


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on it", "ignore:microbatches of a new shape")
@pytest.mark.parametrize("make", right.values(), ids=list(right))
def test_step_with_branches_on_values_equals_eager(make):
    torch.manual_seed(0)
    model, step, batch = make()
    torch.manual_seed(0)
    alone = make()[0]
    pieces = split_batch(batch, MICROBATCHES, find_batch_dims(model, step, batch, microbatches=MICROBATCHES))
    assert [piece.batch["x"].shape[0] for piece in pieces] == [ROWS // MICROBATCHES] * MICROBATCHES
    operators = operators_of(capture_step(model, step, pieces[0].batch))
    team, plan = ThreadTeam(2), even_plan(operators, 2, MICROBATCHES)
    example = Example(model, step, pieces[0], operators)
    with Pipeline(Session(Trainer(example, plan, team, Training(optimizer=OPTIMIZER)))) as pipe:
        pipe._session.load(weights_from(None, model, 0))
        found = distance_to_one_process(
            pipe, team, alone, step, batch, OPTIMIZER, microbatches=MICROBATCHES, steps=3, batch_dims=0
        )
    assert found.within(1e-9, 1e-9), found
