"""What this machine is, for those who read what was measured on it."""

import os
import platform
from pathlib import Path

import torch

from .memory_left import data_limit, machine_bytes


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


def fingerprint(device: torch.device, threads: int) -> str:
    """What measured times depend on, of the machine and of this process: processor, cores, threads, memory, GPU.

    Args:
        device: that this process computes on.
        threads: of the host, with which it does.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    limit = data_limit()
    return (
        f"{_processor()}, {os.cpu_count()} cores, {cores} for this process, {threads} threads, {machine_bytes()} bytes"
        f", limit {limit}, {name}, {platform.system()}, Python {platform.python_version()}"
    )
