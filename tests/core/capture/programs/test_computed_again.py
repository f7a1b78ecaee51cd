"""Casts, and wide tensors from narrow ones, that the backward computes again: their memory, bits, and what is saved."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs import recomputed
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn
from torch.nn import functional as F

from ....support.cuts import batch_on
from ....support.models import CASES, Block, TinyGPT
from ....support.training import SGD, case_of, gradients, pipeline_of, unequal

VOCABULARY, WIDTH, ROWS, LENGTH, MANY = 512, 16, 2, 64, 512


def saved_bytes(model, step, batch=None):
    batch = torch.randint(0, 32, (ROWS, LENGTH)) if batch is None else batch
    operators = operators_of(capture_step(model, step, batch))
    return stage_programs(stage_graph(operators, [[n.name for n in operators.graph.nodes]], 0)).memory.saved


@pytest.fixture
def save(monkeypatch):
    """Save casts, or wide tensors, instead of computing them again."""
    return lambda what: monkeypatch.setattr(recomputed, {"casts": "MOST_NARROW", "wide": "MOST_WIDE"}[what], 0)


def transformer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, WIDTH), *(Block(WIDTH, 0.0) for _ in range(2))).eval()


def mean(model, batch):
    return model(batch).float().mean()


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def float_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["y"].flatten())


def under_autocast(step):
    def run(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model, batch)

    return run


def words(rows=ROWS, dtype=None):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, VOCABULARY, (rows, LENGTH // 2), generator=generator) for name in "xy"}


@pytest.mark.parametrize(
    ("make", "step", "by_hand", "batch", "what", "more"),
    [
        (transformer, mean, mean, None, "casts", 1.1),
        (language_model, loss, loss, words(), "wide", 1.5),
        (language_model, loss, float_loss, words(), "wide", 1.5),
    ],
)
def test_autocast_saves_what_a_model_cast_by_hand_saves(make, step, by_hand, batch, what, more, save):
    hand = saved_bytes(make().bfloat16(), by_hand, batch)
    assert saved_bytes(make(), under_autocast(step), batch) <= 1.05 * hand
    save(what)
    assert saved_bytes(make(), under_autocast(step), batch) > more * hand


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("casts", {"split": True}),
        ("wide", {"recompute": None}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("casts", {"recompute": None}), ("wide", {"split": True}), ("casts", {}), ("wide", {}))
        ),
    ],
)
def test_gradients_have_the_bits_of_saved_tensors(what, options, save):
    def trained():
        # Pipelines of one case share their programs.
        case = case_of(language_model, under_autocast(loss), words)
        if what == "casts":
            gpt = CASES["tied gpt with dropout"]
            case = case_of(lambda: TinyGPT(dropout=0.1), under_autocast(loss), gpt.batch)
        pipe, _ = pipeline_of(case, 6, 3, optimizer=SGD, plan_options=options)
        pipe.step(batch_on(case, 6, torch.float32, "cpu"))
        return gradients(pipe._session.model), sum(each.memory.saved for each in pipe._session.programs.values())

    again, saved = trained()
    save(what)
    wanted, more = trained()
    assert unequal(again, wanted) == []
    assert saved < more


class Narrow(nn.Module):
    """A bfloat16 layer, a function of its output, and a mean."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH).bfloat16(), function
        self.register_buffer("scale", torch.ones(MANY, WIDTH, dtype=torch.bfloat16))

    def forward(self, x):
        return self.function(self.layer(x), self.scale)


def change(x, scale):
    """Reads a buffer that it then changes."""
    y = scale.float().exp()
    scale.add_(1)
    return (x.float() * y).mean()


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x, _: x.float().square().mean(), 1),
        (lambda x, _: (x.float() + 1).square().exp().mean(), 1),  # the first of two
        (lambda x, _: (x.float() + 1).mul(2).sin().exp().mean(), 0),  # too many operators
        (lambda x, _: x.square().mean().float(), 0),  # nothing wide is saved
        (change, 0),
    ],
)
def test_wide_tensor_is_computed_again_if_that_saves_memory(function, tensors, save):
    batch = torch.randn(MANY, WIDTH).bfloat16()
    again = saved_bytes(Narrow(function), lambda model, batch: model(batch), batch)
    save("wide")
    assert saved_bytes(Narrow(function), lambda model, batch: model(batch), batch) - again == tensors * MANY * WIDTH * 2
