"""Shared tensors in a step: computed once, freed after the stage's last action, and the gradients of one process."""

import functools

import pytest
import torch
from attrs import evolve
from panpipe.core.capture.graph.storages import StorageMeter, storage_sizes
from panpipe.core.capture.programs import programs as derived
from panpipe.runtimes.diagnose.parity import reference_step
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from ...support.training import case_of, gradients, pipeline_of, unequal

SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH, MICROBATCHES, ROWS = 8, 4, 8


class Mask(nn.Module):
    """Half of a weight, by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH) % 2).view(WIDTH, WIDTH).float())

    def forward(self, weight):
        return weight * self.mask


class Mixed(nn.Module):
    """Weight norm, a masked weight, spectral norm with its written buffers, BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weighted = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.masked = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.masked, "weight", Mask())
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.dropout(self.first(x).tanh(), 0.1)
        x = self.norm(self.weighted(x))
        x = self.spectral(self.masked(x).relu())
        return self.last(x)


class Divided(nn.Module):
    """A weight in two parts: the first stage reads one of them, and sends on what it computes from the other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, x):
        first, last = self.weight.split(WIDTH, dim=1)
        x, last = x @ first, last.tanh()
        for _ in range(4):
            x = (x + 1).tanh()
        return x @ last


def plain(model, batch):
    return model(batch["x"]).square().mean()


def in_bf16(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, batch)


def batch_of(rows, dtype):
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))}


def bf16_rows(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).square().mean()


def rows_of(rows, dtype):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))


PLANS = {
    "split": {"split": True},
    "recompute": {"recompute": None},
    "two chunks": {"schedule_name": "zb-v", "chunks": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_shared_weights_train_as_in_one_process(name):
    case = case_of(Mixed, in_bf16, batch_of)
    pipe, alone = pipeline_of(case, ROWS, MICROBATCHES, optimizer=SGD, plan_options=PLANS[name])
    torch.set_num_threads(1)
    optimizer = SGD(alone.parameters())
    for step in range(3):
        batch = case.batch(ROWS, torch.float32)
        if step == 1:
            pipe.evaluate(batch)
        loss = pipe.step(batch)
        wanted = reference_step(alone, case.step, batch, microbatches=MICROBATCHES, seed=3, index=step)
        assert loss.item() == wanted.item()
        assert unequal(gradients(pipe._session.model), gradients(alone)) == []
        optimizer.step()
        optimizer.zero_grad()


def test_a_divided_weight_whose_parts_are_not_all_shared_trains_as_in_one_process():
    case = case_of(Divided, plain, batch_of)
    pipe, alone = pipeline_of(case, ROWS, MICROBATCHES, optimizer=SGD)
    batch = case.batch(ROWS, torch.float32)
    loss = pipe.step(batch)
    assert loss.item() == reference_step(alone, case.step, batch, microbatches=MICROBATCHES, seed=3).item()
    assert unequal(gradients(pipe._session.model), gradients(alone)) == []


def test_shared_tensors_are_computed_once_a_step_and_freed(monkeypatch):
    """By the first F of each stage, for microbatches of both shapes; no storage is left after the step."""
    calls, meter, made = [], StorageMeter(), derived.shared_program

    def counting(run):
        def call(given, sink):
            own = storage_sizes(given)
            values = run(given, sink)
            calls.append(len(values))
            meter.watch(values, own)
            return values

        return call

    def counted(joint, inputs, nodes):
        shared = made(joint, inputs, nodes)
        return None if shared is None else evolve(shared, run=counting(shared.run))

    monkeypatch.setattr(derived, "shared_program", counted)
    case = case_of(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), bf16_rows, rows_of
    )
    pipe, _ = pipeline_of(case, 7, 3, optimizer=SGD)
    batch = case.batch(7, torch.float32)
    pipe.step(batch)  # derives the programs of the smaller shape
    calls.clear()
    pipe.step(batch)
    assert len(calls) == 2  # stages
    assert meter.peak > 0
    assert meter.alive == 0
