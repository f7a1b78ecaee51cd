"""What this machine is, for those who read what was measured on it."""

import os
import platform
from pathlib import Path

import torch


def machine(device: torch.device | None = None) -> str:
    """Processor or GPU, cores and versions, in one line.

    Args:
        device: that was measured; the host if None.
    """
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device is not None and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    return f"{_processor()}, {os.cpu_count()} cores, {versions}"


def _processor() -> str:
    found = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return found
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), found)
