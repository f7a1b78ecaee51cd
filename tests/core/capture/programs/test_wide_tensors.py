"""Wide tensors that the backward computes again from narrow ones: their memory, their bits, and which stay saved."""

import panpipe.core.capture.programs.programs as programs_module
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn
from torch.nn import functional as F

from ....support.cuts import batch_on
from ....support.training import SGD, case_of, gradients, pipeline_of, unequal

VOCABULARY, WIDTH, ROWS, LENGTH, MANY = 512, 16, 2, 32, 512


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss(model, batch)


def float_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["y"].flatten())


def batch_of(rows=ROWS, dtype=None):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator) for name in "xy"}


def saved_bytes(model, step):
    operators = operators_of(capture_step(model, step, batch_of()))
    stage = stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0)
    return stage_programs(stage).memory.saved


def save_wide(monkeypatch):
    monkeypatch.setattr(programs_module, "recompute_wide", lambda *_: set())


@pytest.mark.parametrize("by_hand", [loss, float_loss])
def test_loss_over_a_large_vocabulary_saves_what_it_saves_cast_by_hand(by_hand, monkeypatch):
    hand = saved_bytes(language_model().bfloat16(), by_hand)
    assert saved_bytes(language_model(), autocast_loss) <= 1.05 * hand
    save_wide(monkeypatch)
    assert saved_bytes(language_model(), autocast_loss) > 1.5 * hand


@pytest.mark.parametrize("options", [{}, {"split": True}, {"recompute": None}], ids=["whole", "split", "recompute"])
def test_gradients_have_the_bits_of_saved_tensors(options, monkeypatch):
    def trained():
        # Pipelines of one case share their programs.
        case = case_of(language_model, autocast_loss, batch_of)
        pipe, _ = pipeline_of(case, 6, 3, optimizer=SGD, plan_options=options)
        pipe.step(batch_on(case, 6, torch.float32, "cpu"))
        return gradients(pipe._session.model), sum(
            programs.memory.saved for programs in pipe._session.programs.values()
        )

    again, saved = trained()
    save_wide(monkeypatch)
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


def difference(function, monkeypatch):
    def step(model, batch):
        return model(batch)

    def of():
        torch.manual_seed(0)
        batch = torch.randn(MANY, WIDTH).bfloat16()
        operators = operators_of(capture_step(Narrow(function), step, batch))
        return stage_programs(stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0)).memory.saved

    again = of()
    with monkeypatch.context() as patch:
        save_wide(patch)
        return of() - again


def test_a_tensor_is_computed_again_if_that_saves_memory(monkeypatch):
    size = MANY * WIDTH * 2  # of the layer's output, in bfloat16
    assert difference(lambda x, _: x.float().square().mean(), monkeypatch) == size
    assert difference(lambda x, _: x.float().exp().mean(), monkeypatch) == size
    assert difference(lambda x, _: (x.float() + 1).square().exp().mean(), monkeypatch) == size  # the first of two
    assert difference(lambda x, _: (x.float() + 1).mul(2).sin().exp().mean(), monkeypatch) == 0  # too many operators
    assert difference(lambda x, _: (x.float() @ x.float().T).mean(), monkeypatch) >= 0
    assert difference(lambda x, _: x.square().mean().float(), monkeypatch) == 0  # nothing wide is saved


def test_a_buffer_that_changes_is_not_read_later(monkeypatch):
    assert difference(change, monkeypatch) == 0
