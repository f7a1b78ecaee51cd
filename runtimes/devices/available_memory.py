"""The memory that a process can still allocate: of the machine, or under the operating system's limit."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_USABLE, _RESERVE_BYTES = 0.95, 32 << 20
"""Largest share of the remaining limit that planning uses, and smallest number of bytes that it does not use: the limit
also counts the heap's holes, the interpreter's memory, and what is imported and compiled later. Stages of layers of 4
to 9 MB took 8 to 21 MB more than planned."""
_GROUPS, _VERSION_1 = Path("/sys/fs/cgroup"), "memory.limit_in_bytes"


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of the container's limit if that is less."""
    physical, container = physical_bytes(), container_bytes()
    return physical if container is None else min(physical, container)


def physical_bytes() -> int:
    """Bytes of this machine's memory."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def container_bytes() -> int | None:
    """The least limit on memory, in bytes, of this process's control group and of those that it is in; None without.

    Version 1 of control groups has a number larger than any memory where there is no limit.
    """
    limits = [int(text) for file in _limit_files() if (text := _text(file).strip()).isdigit()]
    return min(limits, default=None)


def _limit_files() -> Iterator[Path]:
    """The files that may have such a limit, of both versions of control groups."""
    own = {"memory": "/", "": "/"}  # controller → group; version 2 has no name
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            own |= {controller: parts[2] for controller in parts[1].split(",") if controller in own}
    for root, name, group in ((_GROUPS, "memory.max", own[""]), (_GROUPS / "memory", _VERSION_1, own["memory"])):
        folder = root / group.strip("/")
        for each in (folder, *folder.parents):
            if each == root or root in each.parents:
                yield each / name


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def lockable_bytes() -> int | None:
    """Bytes that this process can still lock in memory under its limit (``ulimit -l``); None without a limit."""
    if sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else max(soft - _status_bytes("VmLck"), 0)


def bytes_left() -> int | None:
    """Bytes that this process can still allocate under its limit on data (``ulimit -d``); None without a limit."""
    limit = data_limit()
    if limit is None:
        return None
    left = limit - data_bytes()
    return max(int(min(_USABLE * left, left - _RESERVE_BYTES)), 0)


def data_limit() -> int | None:
    """This process's limit on data (``ulimit -d``), in bytes; None without a limit."""
    if sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def data_bytes() -> int:
    """Bytes of data of this process, as Linux counts them against that limit."""
    return _status_bytes("VmData")


def _status_bytes(name: str) -> int:
    """A number of bytes of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


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
        threads: number of CPU threads that it computes with.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    limit = data_limit()
    return (
        f"{_processor()}, {os.cpu_count()} cores, {cores} for this process, {threads} threads, {machine_bytes()} bytes"
        f", limit {limit}, {name}, {platform.system()}, Python {platform.python_version()}"
    )
