"""The share of its rate that a shape reaches: by hand for whole tiles and waves, and laws for all shapes."""

import pytest
import torch
from attrs import evolve
from panpipe.core.analytic.kernels import kernel_of
from panpipe.core.analytic.roofline import kernel_s
from panpipe.core.analytic.shapes import Scores
from panpipe.core.cluster.catalog import find_device

A100 = find_device("A100-80GB")


def test_long_causal_attention_loses_little_and_short_one_half():
    assert Scores(256, 16384, 16384, True, False).share(108) > 0.99
    assert Scores(256, 128, 128, True, False).share(108) == pytest.approx(129 / 256)


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
