"""Casts that the backward computes again: their memory, with which bits, and which are saved all the same."""

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
from ....support.models import CASES, TinyGPT
from ....support.training import SGD, case_of, gradients, pipeline_of, unequal

WIDTH = 16


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a normalisation, on a residual stream."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (part.view(2, -1, 2, WIDTH // 2).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, WIDTH), *layers)


def mean(model, batch):
    return model(batch).float().mean()


def under_autocast(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean(model, batch)


def programs_of(model, step, stages=1, index=0):
    operators = operators_of(capture_step(model, step, torch.randint(0, 32, (2, 64))))
    names = [node.name for node in operators.graph.nodes]
    size = -(-len(names) // stages)
    return stage_programs(stage_graph(operators, [names[i : i + size] for i in range(0, len(names), size)], index))


def saved_casts(monkeypatch):
    monkeypatch.setattr(programs_module, "recompute_casts", lambda *_: set())


def test_transformer_under_autocast_saves_what_it_saves_cast_by_hand(monkeypatch):
    blocks = [Block() for _ in range(4)]
    auto = programs_of(model_of(*blocks), under_autocast).memory.saved
    hand = programs_of(model_of(*blocks).to(torch.bfloat16), mean).memory.saved
    assert auto <= 1.05 * hand
    saved_casts(monkeypatch)
    assert programs_of(model_of(*[Block() for _ in range(4)]), under_autocast).memory.saved > 1.1 * hand


def held_after_input_gradients(memory):
    return memory.saved - memory.freed_by_input + memory.created_by_input


def test_split_backward_hands_the_cast_over_and_frees_its_source(monkeypatch):
    again = programs_of(model_of(*[Block() for _ in range(4)]), under_autocast, 2, 1).memory
    saved_casts(monkeypatch)
    before = programs_of(model_of(*[Block() for _ in range(4)]), under_autocast, 2, 1).memory
    assert again.saved < before.saved
    assert held_after_input_gradients(again) == held_after_input_gradients(before)


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"split": True}, {"recompute": None}],
    ids=["whole", "split", "recompute"],
)
def test_gradients_have_the_bits_of_saved_casts(options, monkeypatch):
    def trained():
        # Pipelines of one case share their programs.
        case = case_of(lambda: TinyGPT(dropout=0.1), autocast_loss, CASES["tied gpt with dropout"].batch)
        pipe, _ = pipeline_of(case, 6, 3, optimizer=SGD, plan_options=options)
        pipe.step(batch_on(case, 6, torch.float32, "cpu"))
        return gradients(pipe._session.model), sum(
            programs.memory.saved for programs in pipe._session.programs.values()
        )

    again, saved = trained()
    saved_casts(monkeypatch)
    wanted, more = trained()
    assert unequal(again, wanted) == []
    assert saved < more


def fixed_saved(model, step, monkeypatch):
    """Saved bytes with the casts computed again, and without."""
    again = programs_of(model, step).memory.saved
    with monkeypatch.context() as patch:
        saved_casts(patch)
        return again, programs_of(model, step).memory.saved


class Narrowed(nn.Module):
    """A product after a cast of what a function computes in float32 from the layer's input."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x):
        return self.layer(self.function(x).to(torch.bfloat16)).float()


def test_only_what_is_computed_from_saved_tensors_is_computed_again(monkeypatch):
    def computed_again(function):
        again, before = fixed_saved(model_of(Narrowed(function)), mean, monkeypatch)
        return before - again

    size = 2 * 64 * WIDTH * 2
    assert computed_again(lambda x: x.sigmoid() * x) == size  # both factors are saved for their product's backward
    assert computed_again(lambda x: x + 1) == 0  # its input is not read otherwise
    assert computed_again(lambda x: x @ x.new_ones(WIDTH, WIDTH)) == 0  # a product is no pass over memory


def test_models_without_casts_are_as_they_were(monkeypatch):
    again, before = fixed_saved(model_of(Block()), mean, monkeypatch)
    assert again == before
