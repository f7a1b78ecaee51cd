"""Computation while communication runs on the same device: its kernels take multiprocessors away.

NCCL moves data by kernels whose thread blocks occupy multiprocessors for the whole transfer. A product that runs
meanwhile has fewer of them: it computes at the share of its rate that is left.
"""

from panpipe.core.cluster.device_type import DeviceType


def share_taken(device: DeviceType) -> float:
    """The share of a device's multiprocessors that communication occupies while it runs, in [0, 1)."""
    if device.multiprocessors is None or device.communication_multiprocessors is None:
        return 0.0
    return device.communication_multiprocessors / device.multiprocessors


def overlapped_s(device: DeviceType, compute_s: float, communication_s: float) -> float:
    """Seconds until both are done, if they start at the same time.

    Args:
        device: on which both run.
        compute_s: seconds of the computation alone.
        communication_s: seconds of the communication, which the computation does not slow.
    """
    during_s = communication_s * (1 - share_taken(device))
    return communication_s + max(0.0, compute_s - during_s)
