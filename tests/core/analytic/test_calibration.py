"""The fit finds the numbers that samples were made from, and its residuals tell when they were not."""

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.analytic.calibration import Sample, calibrate
from panpipe.core.analytic.kernels import Kernel
from panpipe.core.analytic.roofline import kernels_s
from panpipe.core.cluster.catalog import find_device
from panpipe.core.errors import RequestError

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
