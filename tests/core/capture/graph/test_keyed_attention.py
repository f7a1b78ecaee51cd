"""Fused attention with dropout, with random numbers from a key: no scores are saved, and every plan has one mask.

No kernel of a CPU has dropout. The double here is one: it draws from the CPU's generator, returns seed and offset, and
its backward draws the same mask from them. Its keyed operator, traces and programs are those that a GPU has.
"""

import math

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.graph import randomness as keyed_attention
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn
from torch._subclasses import FakeTensorMode

from ....support.by_stages import compare

aten = torch.ops.aten
HEADS, WIDTH, LENGTH = 2, 8, 32


def masked(query, key, dropout, causal, seed):
    """The probabilities, and the mask that the seed draws."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    generator = torch.Generator().manual_seed(int(seed))
    mask = torch.empty_like(scores).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)
    return scores, scores.softmax(-1), mask


def forward(query, key, value, bias, compute, dropout_p=0.0, is_causal=False, scale=None):
    seed = torch.randint(2**31, (), generator=torch.default_generator)
    scores, probabilities, mask = masked(query, key, dropout_p, is_causal, seed)
    return probabilities * mask @ value, scores.logsumexp(-1).float(), seed, torch.zeros((), dtype=torch.int64)


def backward(
    gradient, query, key, value, bias, out, logsumexp, seed, offset, dropout_p, needs, is_causal=False, scale=None
):
    _, probabilities, mask = masked(query, key, dropout_p, is_causal, seed)
    weighted = (gradient @ value.transpose(-1, -2)) * mask
    scores = probabilities * (weighted - (weighted * probabilities).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    value_gradient = (probabilities * mask).transpose(-1, -2) @ gradient
    return scores @ key, scores.transpose(-1, -2) @ query, value_gradient, query.new_empty(0)


@pytest.fixture(scope="module")
def fused():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
    yield
    library._destroy()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = x.shape[0]
        parts = self.inputs(x).view(rows, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = aten._scaled_dot_product_efficient_attention(*parts, None, True, 0.5, True)[0]
        return x + self.outputs(y.transpose(1, 2).reshape(rows, LENGTH, WIDTH))


def step(model, batch):
    return model(batch).square().mean()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), Attention()).double()


@pytest.mark.parametrize("options", [{}, {"split": True}, {"recompute": True}])
def test_fused_attention_with_dropout_has_the_gradients_of_one_process(fused, options):
    for cuts in (1, 3):
        compare(model(), step, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), cuts, **options)


def test_fused_attention_with_dropout_saves_no_scores(fused):
    operators = operators_of(capture_step(model().float(), step, torch.randn(2, LENGTH, WIDTH)))
    programs = stage_programs(stage_graph(operators, [[node.name for node in operators.graph.nodes]], 0))
    scores = 2 * HEADS * LENGTH * LENGTH * 4
    assert max(storage.bytes for storage in programs.storages) < scores
    assert sum(storage.bytes == 8 for storage in programs.storages) == 4  # seed and offset of two layers
    assert programs.recompute.inputs == ()


@pytest.mark.parametrize("kernel", keyed_attention.RULES, ids=str)
def test_keyed_kernels_of_a_gpu_have_the_results_that_their_backward_reads(kernel):
    """By torch's fake kernels, for tensors of a GPU."""
    bias = {} if "flash" in str(kernel) else {"attn_bias": None, "compute_log_sumexp": True}
    with FakeTensorMode() as fakes:
        key = fakes.from_tensor(random_key(0, 0, 0))
        x = torch.empty(2, HEADS, 16, 32, device="cuda", dtype=torch.bfloat16)
        wanted = kernel(x, x, x, **bias, dropout_p=0.1, is_causal=True)
        with KeyedRandom(key) as mode:
            found = kernel(x, x, x, **bias, dropout_p=0.1, is_causal=True)
    assert mode.ordinal == 1
    assert len(found) == len(wanted)
    read = {argument.name for argument in kernel._schema.returns} - {"debug_attn_mask", "cum_seq_q", "cum_seq_k"}
    assert "seed" in str(read) or "rng_state" in str(read)
    for returned, one, other in zip(kernel._schema.returns, found, wanted, strict=True):
        if returned.name not in read:
            continue
        same = [(v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else v for v in (one, other)]
        assert same[0] == same[1]
