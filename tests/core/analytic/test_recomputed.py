"""Analytic bytes of saved tensors: those of a stage's programs, which compute casts and wide tensors again."""

import pytest
import torch
from panpipe.core.analytic.model import model_work
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Layer(nn.Module):
    """A feed-forward layer on a residual stream, after a normalisation or after the product of two parts."""

    def __init__(self, norm):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = x.sigmoid() * x if self.norm is None else self.norm(x)
        return x + self.down(self.up(y).relu())


def model(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, WIDTH), *(Layer(norm) for _ in range(3)))


def mean(model, batch):
    return model(batch).float().mean()


def under_autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean(model, batch)


def saved(model, step, length=8):
    """Bytes by the operators' work, and by the programs of one stage."""
    operators = operators_of(capture_step(model, step, torch.randint(0, 32, (2, length))))
    programs = stage_programs(stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0))
    return sum(operator.saved_bytes for operator in model_work(operators).operators), programs.memory.saved


@pytest.mark.parametrize("norm", [True, False])
def test_casts_that_the_backward_computes_again_are_not_counted(norm):
    work, programs = saved(model(norm), under_autocast)
    assert work == programs


def test_other_casts_are_counted():
    """The residual stream after the embedding is a result of products alone."""
    plain = nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    work, programs = saved(plain, under_autocast)
    assert work == programs
    assert work >= 2 * 2 * 8 * WIDTH * 2


def autocast_cross_entropy(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def float_cross_entropy(model, batch):
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


def spelled_out(model, batch):
    """A cross entropy whose parts are operators of their own."""
    x = model(batch).float()
    return (x.exp().sum(-1).log() - x.mean(-1)).mean()


@pytest.mark.parametrize("step", [autocast_cross_entropy, float_cross_entropy, spelled_out])
def test_wide_tensors_that_the_backward_computes_again_are_not_counted(step):
    def language_model():
        layers = nn.Sequential(model(True), nn.Linear(WIDTH, 512))
        return layers if step is autocast_cross_entropy else layers.to(torch.bfloat16)

    work, programs = saved(language_model(), step, 64)
    assert work == programs
    assert work < saved(language_model(), mean, 64)[0] + 1.1 * 2 * 64 * 512 * 2  # the logits in bfloat16, not float32
