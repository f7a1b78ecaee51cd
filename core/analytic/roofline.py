"""The time of a kernel on a device type: the roofline model (Williams et al., CACM 2009), with rates by shape.

Products may run in another number type than their operands have: those of float32 in TF32, and those of 16-bit numbers
in FP8. The device converts operands to TF32 by itself; FP8 takes a pass over them that reads them and writes half of
their bytes (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433).
"""

from collections.abc import Iterable

from ..cluster.device_type import COMPUTE_KINDS, DeviceType
from ..errors import RequestError
from .kernels import Kernel
from .kinds import ATTENTION, ELEMENTWISE, MATMUL

TF32, FP8 = "tf32", "fp8"
PRODUCTS = {"fp32": TF32, "fp16": FP8, "bf16": FP8}
"""The number type in which products may run, by that of their operands."""


def kernel_s(kernel: Kernel, device: DeviceType, products: str = "") -> float:
    """Seconds of one kernel: the launch, and the longer of its arithmetic and its memory traffic.

    Args:
        products: number type in which products run, where it is one of `PRODUCTS` of their operands'.

    Raises:
        RequestError: the device states no rate for products of this number type.
    """
    efficiency = device.efficiency[kernel.kind]
    limited = kernel.kind in COMPUTE_KINDS
    bandwidth = device.effective_memory_bytes_per_s if limited else device.peak_memory_bytes_per_s * efficiency
    rate = efficiency * (device.sustained or 1.0) if limited else 1.0
    arithmetic_s = peak_s(kernel, device, products) / rate
    converted_s = 0.0
    if products == FP8 and kernel.kind == MATMUL and PRODUCTS.get(kernel.dtype) == FP8:
        moved = 1.5 * kernel.read_bytes
        converted_s = device.launch_overhead_s + moved / (
            device.peak_memory_bytes_per_s * device.efficiency[ELEMENTWISE]
        )
    return converted_s + device.launch_overhead_s + max(arithmetic_s, kernel.bytes / bandwidth)


def peak_s(kernel: Kernel, device: DeviceType, products: str = "") -> float:
    """Seconds of a kernel's arithmetic at the part of the peak rate that its shape can reach, see `shapes`."""
    if not kernel.flops:
        return 0.0
    share = 1.0
    if kernel.shape is not None and device.multiprocessors is not None:
        share = kernel.shape.share(device.multiprocessors)
    return kernel.flops / (rate_of(device, kernel.dtype, products if kernel.kind != ATTENTION else "") * share)


def kernels_s(kernels: Iterable[Kernel], device: DeviceType, products: str = "") -> float:
    """Seconds of kernels that run one after another."""
    return sum(kernel_s(kernel, device, products) for kernel in kernels)


def rate_of(device: DeviceType, number_type: str, products: str = "") -> float:
    """Peak FLOP/s of a device for matrix products.

    Args:
        number_type: of the operands.
        products: number type in which products run; TF32 if the device has it.

    Raises:
        RequestError: the device states no rate for it.
    """
    rates = device.peak_flops_per_s
    faster = products if PRODUCTS.get(number_type) == products and (products != TF32 or TF32 in rates) else ""
    wanted = faster or number_type
    if wanted not in rates:
        raise RequestError(
            f"device '{device.name}' states no rate for matrix products in {wanted}: use --dtype with one of "
            f"{', '.join(rates)}, or add the rate to the device's file"
        )
    return rates[wanted]
