"""bf16 and fp16: by autocast in the user's step, captured bit for bit, and as dtypes of parameters."""

import functools

import panpipe
import pytest
import torch
from panpipe.runtimes.diagnose.parity import reference_step
from torch import nn
from torch.nn import functional as F

from ..support.models import CASES, TinyGPT
from ..support.training import case_of, gradients, pipeline_of, unequal

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Reused(nn.Module):
    """A layer that is called twice, with two others between; one stage casts its weight once for both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.twice, self.norm, self.other = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.trunk = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.twice(self.other(self.norm(self.twice(x)).relu()))
        for layer in self.trunk:
            x = x + layer(x).tanh()
        return self.head(x)


def loss_of(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def under(dtype, **options):
    def step(model, batch):
        with torch.autocast("cpu", dtype=dtype, **options):
            return loss_of(model, batch)

    return step


def two_blocks(model, batch):
    """The loss outside of autocast, one part of the model without it, and one cast by hand."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.twice(model.embedding(batch["x"]))
        with torch.autocast("cpu", enabled=False):
            x = model.norm(model.twice(x.float()))
        x = x + F.linear(x, model.other.weight.to(torch.bfloat16))
        x = model.other(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in model.trunk:
            x = x + layer(layer(x))
    return F.cross_entropy(model.head(x.float()).flatten(0, 1), batch["y"].flatten())


STEPS = {
    "bf16": under(torch.bfloat16),
    "fp16": under(torch.float16),
    "bf16 without a cache": under(torch.bfloat16, cache_enabled=False),
    "blocks": two_blocks,
}


def both(case, rows=6, microbatches=3, dtype=torch.float32, **options):
    """Gradients of a pipeline's first step, and those of untouched eager PyTorch."""
    pipe, alone = pipeline_of(case, rows, microbatches, dtype=dtype, optimizer=SGD, **options)
    batch = case.batch(rows, dtype)
    torch.set_num_threads(1)
    loss = pipe.step(batch)
    wanted = reference_step(alone, case.step, batch, microbatches=microbatches, seed=3)
    assert loss.dtype is wanted.dtype
    assert loss.item() == wanted.item()
    return gradients(pipe._session.model), gradients(alone)


@pytest.mark.parametrize("name", STEPS)
def test_captured_autocast_has_the_bits_of_eager(name):
    case = case_of(Reused, STEPS[name], CASES["tied gpt with dropout"].batch)
    assert unequal(*both(case)) == []


@pytest.mark.parametrize("plan", [{"split": True}, {"recompute": None}])
def test_autocast_with_dropout_attention_and_a_tied_weight(plan):
    case = case_of(functools.partial(TinyGPT, dropout=0.1), STEPS["bf16"], CASES["tied gpt with dropout"].batch)
    mine, alone = both(case, plan_options=plan)
    assert unequal(mine, alone) in ([], ["embedding.weight"])  # tied over stages: summed in another order
    torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_automatic_plan_for_parameters_in_bf16():
    case = case_of(Reused, loss_of, CASES["tied gpt with dropout"].batch)
    model, batch = case.model(torch.bfloat16), case.batch(8, torch.bfloat16)
    pipe = panpipe.pipeline(model, case.step, batch, optimizer=SGD, microbatches=4)
    assert pipe.step(batch).dtype is torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert pipe.plan.prediction.step_s > 0


class Deciding(nn.Module):
    """Doubles what is small: a value decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return 2 * y if y.abs().mean() < 1 else y


class WithPython(Reused):
    """One of its layers stays Python."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk[1] = Deciding()


def test_untraced_region_runs_in_its_autocast():
    case = case_of(WithPython, STEPS["bf16"], CASES["tied gpt with dropout"].batch)
    assert unequal(*both(case)) == []
