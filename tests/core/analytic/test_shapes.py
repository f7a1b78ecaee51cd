"""The share of its rate that a shape reaches: by hand for whole tiles and waves, and laws for all shapes."""

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.analytic.kernels import kernel_of
from panpipe.core.analytic.roofline import kernel_s
from panpipe.core.analytic.shapes import TILE_START, Product, Scores
from panpipe.core.cluster.catalog import find_device

A100 = find_device("A100-80GB")
SIZES = st.integers(1, 20000)


def test_one_full_wave_of_whole_tiles_loses_only_the_start_of_its_tiles():
    product = Product(1, 9 * 256, 12 * 128, 4096)  # 9 × 12 tiles, one for each of 108 multiprocessors
    assert product.share(108) == pytest.approx(4096 / (4096 + TILE_START))


def test_one_tile_more_than_a_wave_takes_nearly_the_time_of_two():
    full, more = Product(108, 256, 128, 8192), Product(109, 256, 128, 8192)
    assert full.share(108) / more.share(108) > 1.4  # not 2, as the second wave takes smaller tiles


def test_partial_tiles_take_the_time_of_whole_ones():
    assert Product(108, 129, 128, 4096).share(108) < 0.55 * Product(108, 256, 128, 4096).share(108) + 0.1


def test_larger_numbers_have_smaller_tiles():
    half, single = Product(1, 256 * 108, 128, 4096, 2), Product(1, 256 * 108, 128, 4096, 4)
    assert single.share(108) > half.share(
        108
    )  # one wave of tiles in 16 bits are two in 32: as full, with shorter starts


@given(st.integers(1, 64), SIZES, SIZES, SIZES, st.sampled_from([2, 4]), st.integers(1, 200))
def test_share_of_a_product_is_above_0_and_at_most_1(batch, rows, columns, inner, size, count):
    assert 0 < Product(batch, rows, columns, inner, size).share(count) <= 1


@given(SIZES, SIZES, SIZES, st.integers(2, 5))
def test_a_longer_inner_dimension_is_never_less_efficient(rows, columns, inner, times):
    assert Product(1, rows, columns, times * inner).share(108) >= Product(1, rows, columns, inner).share(108)


@given(st.integers(1, 512), SIZES, st.booleans(), st.booleans(), st.integers(1, 200))
def test_share_of_attention_is_above_0_and_at_most_1(batch, rows, causal, backward, count):
    assert 0 < Scores(batch, rows, rows, causal, backward).share(count) <= 1


def test_long_causal_attention_loses_little_and_short_one_half():
    assert Scores(256, 16384, 16384, True, False).share(108) > 0.99
    assert Scores(256, 128, 128, True, False).share(108) == pytest.approx(129 / 256)


def test_kernels_of_products_have_their_shapes():
    a, b = torch.empty(7, 5, dtype=torch.bfloat16), torch.empty(5, 3, dtype=torch.bfloat16)
    bias = torch.empty(3, dtype=torch.bfloat16)
    aten = torch.ops.aten
    plain = kernel_of(aten.mm.default, (a, b), {}, a @ b)
    with_bias = kernel_of(aten.addmm.default, (bias, a, b), {}, a @ b)
    batched = kernel_of(aten.bmm.default, (a[None].expand(4, 7, 5), b[None].expand(4, 5, 3)), {}, torch.empty(4, 7, 3))
    assert plain.shape == with_bias.shape == Product(1, 7, 3, 5, 2)
    assert batched.shape == Product(4, 7, 3, 5, 2)


def test_small_products_are_slower_for_each_flop_only_on_devices_with_multiprocessors():
    aten = torch.ops.aten

    def seconds(rows, device):
        a = torch.empty(rows, 4096, device="meta", dtype=torch.bfloat16)
        b = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
        kernel = kernel_of(aten.mm.default, (a, b), {}, torch.empty(rows, 4096, device="meta", dtype=torch.bfloat16))
        return (kernel_s(kernel, device) - device.launch_overhead_s) / rows

    assert seconds(640, A100) > 1.1 * seconds(8192, A100)
    plain = evolve(A100, multiprocessors=None, communication_multiprocessors=None)
    assert seconds(4096, plain) == pytest.approx(seconds(8192, plain))


def test_training_sustains_a_share_of_the_rate_of_products():
    aten = torch.ops.aten
    a = torch.empty(8192, 8192, device="meta", dtype=torch.bfloat16)
    kernel = kernel_of(aten.mm.default, (a, a), {}, torch.empty_like(a))
    isolated = evolve(A100, sustained=None)
    launch = A100.launch_overhead_s
    assert (kernel_s(kernel, isolated) - launch) / (kernel_s(kernel, A100) - launch) == pytest.approx(A100.sustained)
