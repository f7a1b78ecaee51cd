"""The time of a kernel on a device type: the roofline model (Williams et al., CACM 2009), with rates by shape."""

from collections.abc import Iterable

from ..cluster.device_type import COMPUTE_KINDS, DeviceType
from ..errors import RequestError
from .kernels import Kernel


def kernel_s(kernel: Kernel, device: DeviceType, *, tf32: bool = False) -> float:
    """Seconds of one kernel: the launch, and the longer of its arithmetic and its memory traffic.

    Args:
        kernel: its FLOPs and bytes.
        device: the type of device.
        tf32: whether products of float32 run at the rate of TF32.

    Raises:
        RequestError: the device states no rate for products of this number type.
    """
    efficiency = device.efficiency[kernel.kind]
    limited = kernel.kind in COMPUTE_KINDS
    bandwidth = device.effective_memory_bytes_per_s if limited else device.peak_memory_bytes_per_s * efficiency
    rate = efficiency * (device.sustained or 1.0) if limited else 1.0
    arithmetic_s = peak_s(kernel, device, tf32=tf32) / rate
    return device.launch_overhead_s + max(arithmetic_s, kernel.bytes / bandwidth)


def peak_s(kernel: Kernel, device: DeviceType, *, tf32: bool = False) -> float:
    """Seconds of a kernel's arithmetic at the part of the peak rate that its shape can reach, see `shapes`."""
    if not kernel.flops:
        return 0.0
    share = 1.0
    if kernel.shape is not None and device.multiprocessors is not None:
        share = kernel.shape.share(device.multiprocessors)
    return kernel.flops / (rate_of(device, kernel.dtype, tf32) * share)


def kernels_s(kernels: Iterable[Kernel], device: DeviceType, *, tf32: bool = False) -> float:
    """Seconds of kernels that run one after another."""
    return sum(kernel_s(kernel, device, tf32=tf32) for kernel in kernels)


def rate_of(device: DeviceType, number_type: str, tf32: bool = False) -> float:
    """Peak FLOP/s of a device for matrix products.

    Args:
        device: the type of device.
        number_type: of the products.
        tf32: whether products of float32 run as TF32, if the device has it.

    Raises:
        RequestError: the device states no rate for it.
    """
    rates = device.peak_flops_per_s
    wanted = "tf32" if tf32 and number_type == "fp32" and "tf32" in rates else number_type
    if wanted not in rates:
        raise RequestError(
            f"device '{device.name}' states no rate for matrix products in {wanted}: use --dtype with one of "
            f"{', '.join(rates)}, or add the rate to the device's file"
        )
    return rates[wanted]
