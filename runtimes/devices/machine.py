"""A description of this machine, stored with measurements."""

import os
import platform
from pathlib import Path

import torch

from .available_memory import data_limit, machine_bytes


def machine(device: torch.device | None = None) -> str:
    """Processor or GPU, cores and versions, in one line.

    Args:
        device: the measured device; the host if None.
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


def measured_properties(device: torch.device, threads: int) -> str:
    """The properties of the machine and process that measured times depend on: processor, cores, threads, memory, GPU.

    Args:
        device: this process's device.
        threads: number of CPU threads that it computes with.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    limit = data_limit()
    return (
        f"{_processor()}, {os.cpu_count()} cores, {cores} for this process, {threads} threads, {machine_bytes()} bytes"
        f", limit {limit}, {name}, {platform.system()}, Python {platform.python_version()}"
    )
