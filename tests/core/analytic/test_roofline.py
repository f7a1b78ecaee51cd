"""The roofline by hand, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.analytic.kernels import Kernel
from panpipe.core.analytic.roofline import kernel_s, kernels_s
from panpipe.core.cluster.catalog import find_device
from panpipe.core.errors import RequestError

A100 = find_device("A100-40GB")
"""312 TFLOP/s in bf16, 19.5 in fp32, 156 in TF32; 1555 GB/s, of which a large copy reaches 1393; 5 µs a launch."""


def product(rows, inner, columns, dtype, size):
    flops = 2 * rows * inner * columns
    read, written = size * (rows * inner + inner * columns), size * rows * columns
    return Kernel("mm", "matmul", dtype, flops, flops, read, written)


def test_large_product_is_limited_by_arithmetic():
    kernel = product(4096, 4096, 4096, "bf16", 2)
    share = A100.efficiency["matmul"] * A100.sustained
    assert kernel_s(kernel, A100) == pytest.approx(5e-6 + 2 * 4096**3 / (312e12 * share))
    assert kernel_s(product(4096, 4096, 4096, "fp32", 4), A100) == pytest.approx(5e-6 + 2 * 4096**3 / (19.5e12 * share))


def test_thin_product_is_limited_by_memory():
    kernel = product(1, 4096, 4096, "bf16", 2)
    assert kernel_s(kernel, A100) == pytest.approx(5e-6 + 2 * (4096 + 4096**2 + 4096) / 1393e9)


def test_tf32_is_used_only_for_float32_products_on_devices_that_support_it():
    single, half = product(4096, 4096, 4096, "fp32", 4), product(4096, 4096, 4096, "bf16", 2)
    work = kernel_s(single, A100) - 5e-6
    assert kernel_s(single, A100, "tf32") == pytest.approx(5e-6 + work / 8)
    assert kernel_s(half, A100, "tf32") == kernel_s(half, A100)
    without = evolve(A100, peak_flops_per_s={"fp32": 19.5e12})
    assert kernel_s(single, without, "tf32") == kernel_s(single, A100)


def test_elementwise_operator_is_limited_by_memory_with_its_own_efficiency():
    kernel = Kernel("add", "elementwise", "bf16", 0, 0, 2_000_000, 1_000_000)
    assert kernel_s(kernel, A100) == pytest.approx(5e-6 + 3e6 / (1555e9 * A100.efficiency["elementwise"]))
    assert kernels_s([kernel, kernel], A100) == pytest.approx(2 * kernel_s(kernel, A100))
    assert kernels_s([], A100) == 0


def test_a_number_type_without_a_rate_is_refused():
    with pytest.raises(
        RequestError, match="device 'A100-40GB' states no rate for matrix products in fp64: use --dtype"
    ):
        kernel_s(product(8, 8, 8, "fp64", 8), A100)
