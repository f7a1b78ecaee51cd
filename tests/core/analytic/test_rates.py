"""Rates: fitted to samples, reached by shapes; and what optimizers keep and move."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.analytic.calibration import Sample, calibrate
from panpipe.core.analytic.kernels import Kernel, kernel_of
from panpipe.core.analytic.optimizers import find_optimizer
from panpipe.core.analytic.roofline import kernel_s, kernels_s
from panpipe.core.analytic.shapes import Scores
from panpipe.core.cluster.catalog import find_device
from panpipe.core.errors import RequestError

# The fit finds the numbers that samples were made from, and its residuals are large for other samples.


BASE = find_device("A100-40GB")
SIZES = [10**e for e in range(3, 10)]


def kernels():
    for size in SIZES:
        yield Kernel("mm", "matmul", "bf16", size * 100_000, size * 100_000, size, size)
        yield Kernel("mv", "matmul", "bf16", 4 * size, 4 * size, 2 * size, size)
        yield Kernel("add", "elementwise", "bf16", 0, 0, 2 * size, size)
        yield Kernel("embedding", "gather", "bf16", 0, 0, size, size)


def samples(device, spoil=None):
    """Operators of a device, measured in isolation."""
    found, device = [], evolve(device, sustained=None)
    for kernel in kernels():
        name = f"{kernel.name} {kernel.bytes}"
        seconds = kernels_s([kernel], device) * (spoil or {}).get(kernel.name, 1)
        found.append(Sample(name, name, (kernel,), seconds))
    return found


@settings(max_examples=10, deadline=None)
@given(
    matmul=st.floats(0.05, 0.95), elementwise=st.floats(0.05, 0.95), gather=st.floats(0.05, 0.95),
    share=st.floats(0.1, 0.95), launch_s=st.floats(1e-6, 1e-4),
)  # fmt: skip
def test_calibration_recovers_the_device_of_synthetic_samples(matmul, elementwise, gather, share, launch_s):
    efficiency = {**BASE.efficiency, "matmul": matmul, "elementwise": elementwise, "gather": gather}
    bandwidth = share * BASE.peak_memory_bytes_per_s
    true = evolve(
        BASE, efficiency=efficiency, launch_overhead_s=launch_s, effective_memory_bytes_per_s=bandwidth
    )  # fmt: skip
    found = calibrate(samples(true), BASE)
    assert found.median_error < 1e-3
    assert found.device.efficiency == pytest.approx(efficiency, rel=1e-2)  # attention was not measured, and stays
    assert found.device.launch_overhead_s == pytest.approx(launch_s, rel=1e-2)
    assert found.device.effective_memory_bytes_per_s == pytest.approx(bandwidth, rel=1e-2)
    assert found.fitted == (
        "efficiency.matmul", "efficiency.elementwise", "efficiency.gather", "effective_memory_bytes_per_s",
        "launch_overhead_s",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:2], "2 cases were measured: a fit, and one without each of them, needs at least 3"),
        (lambda found: [*found, evolve(found[0], name="x", seconds=0.0)], "'x' took 0.0 s in 1 kernels"),
        (
            lambda found: [evolve(s, kernels=(evolve(s.kernels[0], dtype="fp64"),)) for s in found],
            "no rate for .* fp64",
        ),
    ],
)
def test_wrong_samples_are_refused(change, message):
    with pytest.raises(RequestError, match=message):
        calibrate(change(samples(BASE)), BASE)


# The share of its rate that a shape reaches: by hand for whole tiles and waves, and laws for all shapes.


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


# What optimizers keep and move, compared with torch's own and the papers' counts.


TORCH = {
    "adam": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_has_the_bytes_of_torchs(name, dtype):
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = TORCH[name]([parameter])
    optimizer.step()
    kept = [parameter, parameter.grad, *optimizer.state[parameter].values()]
    size = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor) and tensor.numel() > 1)
    assert find_optimizer(name).state_bytes(dtype.itemsize) * 1000 == size


def test_mixed_precision_keeps_16_bytes_a_parameter():
    """ZeRO (arXiv 1910.02054), section 3.1: 2 + 2 + 12."""
    mixed = find_optimizer("adam-master")
    assert mixed.state_bytes(2) == 16
    assert mixed.state_bytes(4) == find_optimizer("adam").state_bytes(4) == 16
    assert mixed.state_bytes(8) == 32  # a double needs no copy in less
