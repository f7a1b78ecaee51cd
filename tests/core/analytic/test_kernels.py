"""FLOPs and bytes of one call of an operator, counted by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.analytic.attention import FORWARD
from panpipe.core.analytic.kernels import Kernel, kernel_of, touched_bytes
from panpipe.core.analytic.shapes import Product, Scores

aten = torch.ops.aten


def called(target, *args, **kwargs):
    return kernel_of(target, args, kwargs, target(*args, **kwargs))


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.zeros(2, 3), 24), (torch.zeros(()), 4), (torch.zeros(0, 5), 0), (torch.zeros(3, 1).expand(3, 4), 12),
        (torch.zeros(2, 3, dtype=torch.float64), 48), (torch.zeros(4, 6)[:, ::2], 48),
    ],
)  # fmt: skip
def test_bytes_of_distinct_elements(tensor, size):
    assert touched_bytes(tensor) == size


def test_product_of_matrices_counts_its_flops_and_bytes():
    found = called(aten.mm.default, torch.ones(2, 3), torch.ones(3, 5))
    # 2 · 2 · 3 · 5 FLOPs; 6 + 15 elements read and 10 written, of 4 bytes
    assert found == Kernel("mm", found.kind, "fp32", 60, 60, 84, 40, Product(1, 2, 5, 3, 4))
    assert found.bytes == 124


def test_products_in_a_batch_and_with_a_bias_count_their_flops_and_bytes():
    found = called(aten.bmm.default, *(torch.ones(4, *shape, dtype=torch.bfloat16) for shape in ((2, 3), (3, 5))))
    assert (found.flops, found.shape, found.dtype) == (240, Product(4, 2, 5, 3, 2), "bf16")
    found = called(aten.addmm.default, torch.ones(5), torch.ones(2, 3), torch.ones(3, 5))
    assert (found.flops, found.shape) == (60, Product(1, 2, 5, 3, 4))
    assert (found.read_bytes, found.written_bytes) == (4 * (5 + 6 + 15), 40)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=10)
def test_product_has_two_flops_for_each_pair_of_elements(rows, inner, columns):
    found = called(aten.mm.default, torch.ones(rows, inner), torch.ones(inner, columns))
    assert found.flops == found.counted_flops == 2 * rows * inner * columns


def test_views_allocations_and_numbers_are_no_kernels():
    x = torch.ones(2, 3)
    assert called(aten.view.default, x, [6]) is None
    assert called(aten.empty_like.default, x) is None
    assert called(aten.new_empty.default, x, [2]) is None


def test_pointwise_operator_is_bound_by_memory():
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    found = called(aten.mul.Tensor, x, y)
    assert (found.flops, found.shape, found.read_bytes, found.written_bytes) == (0, None, 48, 24)
    assert called(aten.mul.Tensor, x, x).read_bytes == 24  # one tensor is read once
    assert called(aten.mul.Tensor, x, torch.ones(1).expand(2, 3)).read_bytes == 24 + 4


def test_operators_in_place_write_their_arguments():
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    found = called(aten.add_.Tensor, x, y)
    assert (found.read_bytes, found.written_bytes) == (48, 24)
    found = called(aten.zero_.default, x)
    assert (found.read_bytes, found.written_bytes) == (0, 24)
    out = torch.ones(2, 3)
    assert called(aten.add.out, x, y, out=out).written_bytes == 24
    assert called(aten.zeros_like.default, x).read_bytes == 0


def test_embedding_reads_rows_that_it_selects():
    found = called(aten.embedding.default, torch.ones(100, 4), torch.tensor([1, 2, 3]))
    assert (found.read_bytes, found.written_bytes) == (3 * 8 + 3 * 4 * 4, 48)


def test_loss_reads_one_element_of_each_row():
    scores, target = torch.zeros(2, 5), torch.tensor([1, 4])
    found = called(aten.nll_loss_forward.default, scores, target, None, 1, -100)
    assert (found.read_bytes, found.written_bytes) == (2 * 8 + 2 * 4, 8)
    found = called(
        aten.nll_loss_backward.default, torch.ones(()), scores, target, None, 1, -100, torch.tensor(2.0)
    )  # fmt: skip
    assert (found.read_bytes, found.written_bytes) == (4 + 2 * 8, 40)


OPTIONS = [1, 1], [0, 0], [1, 1]


def test_convolution_multiplies_a_filter_with_each_element_of_the_result():
    x, weight = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)
    found = called(aten.convolution.default, x, weight, None, *OPTIONS, False, [0, 0], 1)
    assert found.flops == 2 * (3 * 2 * 2) * (2 * 3 * 3)
    weight = torch.ones(2, 3, 3, 3)
    found = called(aten.convolution.default, x, weight, None, *OPTIONS, True, [0, 0], 1)
    assert found.flops == 2 * (2 * 4 * 4) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("mask", "flops", "read"),
    [
        ([True, True, True], 864, 4 * (12 + 54 + 32)), ([False, True, False], 432, 4 * (12 + 32)),
        ([True, False, False], 432, 4 * (12 + 54)),
    ],
)  # fmt: skip
def test_backward_of_a_convolution_computes_what_is_wanted(mask, flops, read):
    x, weight, gradient = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3), torch.ones(1, 3, 2, 2)
    found = called(aten.convolution_backward.default, gradient, x, weight, [3], *OPTIONS, False, [0, 0], 1, mask)
    assert (found.flops, found.read_bytes) == (flops, read)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_has_the_shape_of_its_scores(causal):
    query, key = torch.ones(2, 3, 8, 4), torch.ones(2, 3, 8, 4)
    result = torch.empty_like(query), torch.empty(2, 3, 8)
    found = kernel_of(FORWARD, (query, key, key, None, causal), {}, result)
    assert found.shape == Scores(6, 8, 8, causal, False, 2 * 4 * 2 * 3 * 8 * 4)
    assert found.flops > 0


def test_integers_count_as_single_precision():
    assert called(aten.add.Tensor, torch.ones(2, dtype=torch.int64), 1).dtype == "fp32"
    assert called(aten.add.Tensor, torch.ones(2, dtype=torch.float64), 1).dtype == "fp64"
