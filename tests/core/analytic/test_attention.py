"""What a fused attention keeps, and what a mask and a causal one change."""

import pytest
import torch
from panpipe.core.analytic.attention import score_products
from panpipe.core.analytic.model import model_work
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from torch import nn
from torch.nn import functional as F

B, A, S, D = 2, 3, 16, 8


class Attention(nn.Module):
    """Queries, keys and values straight from parameters, mixed."""

    def __init__(self, kind, groups=A, dtype=torch.float32):
        super().__init__()
        self.kind = kind
        self.mix = nn.Linear(D, D, bias=False, dtype=dtype)
        self.keys, self.values = (nn.Parameter(torch.zeros(B, groups, S, D, dtype=dtype)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(1, A, S, S, dtype=dtype))
        self.register_buffer("mask", torch.ones(S, S, dtype=torch.bool).tril())

    def forward(self, x):
        options = {
            "full": {},
            "causal": {"is_causal": True},
            "masked": {"attn_mask": self.mask},
            "biased": {"attn_mask": self.bias},
            "grouped": {"enable_gqa": True},
        }[self.kind]
        mixed = F.scaled_dot_product_attention(self.mix(x), self.keys * 2, self.values * 2, **options)
        return mixed.square()


def attention_of(kind, **options):
    dtype = options.get("dtype", torch.float32)
    model, x = Attention(kind, **options), torch.zeros(B, A, S, D, dtype=dtype)
    work = model_work(operators_of(capture_step(model, lambda model, x: model(x).float().sum(), x)))
    return next(op for op in work.operators if any(k.name == "fused_attention" for k in op.work.forward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_saves_inputs_output_and_logsumexp(dtype):
    operator = attention_of("full", dtype=dtype)
    kept = sum(kept.bytes for kept in operator.work.kept)
    assert kept == 4 * B * A * S * D * dtype.itemsize + 4 * B * A * S  # never S × S


def test_attention_mask_becomes_a_saved_bias():
    masked, full = attention_of("masked"), attention_of("full")
    extra = sum(k.bytes for k in masked.work.kept) - sum(k.bytes for k in full.work.kept)
    assert extra == 4 * S * S
    assert len(masked.work.forward) > len(full.work.forward)


def test_a_bias_that_is_trained_has_a_gradient():
    operator = attention_of("biased")
    backward = next(k for k in operator.work.backward_input if k.name == "fused_attention_backward")
    plain = next(k for k in attention_of("full").work.backward_input if k.name == "fused_attention_backward")
    assert backward.written_bytes - plain.written_bytes == 4 * A * S * S


def test_grouped_query_attention_does_not_repeat_keys():
    operator = attention_of("grouped", groups=1)
    forward = next(k for k in operator.work.forward if k.name == "fused_attention")
    assert forward.flops == 4 * B * A * S * S * D
    assert forward.read_bytes == 4 * (B * A * S * D + 2 * B * S * D)


def test_pairs_of_rows_that_a_causal_kernel_multiplies():
    def pairs(rows, columns):
        query, key = torch.empty(1, 1, rows, D), torch.empty(1, 1, columns, D)
        return score_products(query, key, True)

    for rows, columns in ((4, 4), (3, 5), (5, 3)):
        assert pairs(rows, columns) == int(torch.ones(rows, columns).tril().sum())
