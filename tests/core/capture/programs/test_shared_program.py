"""Shared tensors: what depends on parameters alone is computed once a step, and is no saved tensor of a microbatch."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

WIDTH = 16
WEIGHT = WIDTH * WIDTH


def programs_of(model, step, batch):
    operators = operators_of(capture_step(model, step, batch))
    return stage_programs(stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0))


def square(model, batch):
    return model(batch).pow(2).mean()


def in_bf16(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square(model, batch)


def mlp(width=WIDTH, layers=4):
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def test_autocast_saves_what_the_model_cast_by_hand_saves():
    """The bar: saved tensors of autocast are at most 1.05 times those of the model cast to bfloat16 by hand."""

    def step(model, batch):
        return model(batch).mean()

    def auto_step(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model, batch)

    def model():
        return nn.Sequential(nn.Embedding(32, WIDTH), mlp())

    batch = torch.randint(0, 32, (8,))
    auto = programs_of(model(), auto_step, batch).memory
    hand = programs_of(model().to(torch.bfloat16), step, batch).memory
    assert auto.saved <= 1.05 * hand.saved
    assert auto.shared == 4 * (WEIGHT + WIDTH) * 2  # weights and biases
    assert hand.shared == 0


def test_views_of_parameters_are_shared_and_take_no_memory():
    programs = programs_of(mlp(), square, torch.randn(8, WIDTH))
    assert programs.memory.shared == 0
    assert programs.shared is not None
    assert programs.shared.count >= 4


def parametrized(kind):
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    if kind == "weight norm":
        parametrizations.weight_norm(layer)
    elif kind == "pruned":
        prune.random_unstructured(layer, "weight", amount=0.5)
    elif kind == "orthogonal":
        parametrizations.orthogonal(layer, orthogonal_map="cayley")
    return layer


@pytest.mark.parametrize("kind", ["weight norm", "pruned", "orthogonal"])
def test_computed_weights_are_shared(kind):
    torch.manual_seed(0)
    batch = torch.randn(3, WIDTH)
    programs = programs_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), parametrized(kind)), square, batch)
    plain = programs_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), parametrized("")), square, batch)
    assert programs.memory.saved == plain.memory.saved
    assert programs.memory.shared >= WEIGHT * 4


def test_a_weight_that_depends_on_a_written_buffer_is_not_shared():
    layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    programs = programs_of(nn.Sequential(layer), square, torch.randn(3, WIDTH))
    assert programs.mutated
    assert programs.memory.shared == 0


def test_dropout_of_a_weight_is_not_shared():
    class Dropped(nn.Linear):
        def forward(self, x):
            return F.linear(x, F.dropout(self.weight, 0.5), self.bias)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dropped(WIDTH, WIDTH))
    programs = programs_of(model, square, torch.randn(3, WIDTH))
    assert programs.memory.shared == 0
    assert programs.memory.saved >= 2 * WEIGHT


def test_a_result_of_parameters_alone_is_not_shared():
    """The step returns it: every microbatch returns its own."""

    def step(model, batch):
        return square(model, batch), 1.0, {"norm": model[0].weight.square().sum()}

    programs = programs_of(nn.Sequential(nn.Linear(WIDTH, WIDTH)), step, torch.randn(3, WIDTH))
    assert len(programs.results) >= 2
    assert programs.memory.shared == 0


def test_a_causal_mask_is_shared_where_the_backward_reads_it():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.layer(x)
            mask = torch.ones(64, 64, dtype=torch.bool).tril()
            scores = (x @ x.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
            return scores.softmax(-1) @ x

    memory = programs_of(Masked(), square, torch.randn(2, 64, WIDTH)).memory
    assert memory.shared == 64 * 64


def test_another_shape_of_microbatch_has_the_same_shared_tensors():
    keys = {programs_of(mlp(), in_bf16, torch.randn(rows, WIDTH)).shared.key for rows in (4, 5)}
    assert len(keys) == 1
    assert keys != {programs_of(mlp(layers=3), in_bf16, torch.randn(4, WIDTH)).shared.key}
