"""How much memory a process may still take: the machine's, or what the operating system leaves of a limit."""

import os
import sys
from pathlib import Path

_USABLE = 0.95
"""Share of what a limit leaves that planning counts on: the heap's holes and the interpreter's own blocks are counted
too where a limit is enforced."""


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of the container's where that has less."""
    physical = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")
    except OSError:
        return physical
    return min(physical, int(text)) if text.strip().isdigit() else physical


def bytes_left() -> int | None:
    """Bytes of data that this process may still take under its own limit (``ulimit -d``); None where it has none."""
    limit = data_limit()
    return None if limit is None else int(_USABLE * max(limit - data_bytes(), 0))


def data_limit() -> int | None:
    """The limit of this process on its data (``ulimit -d``), in bytes; None where it has none."""
    if sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def data_bytes() -> int:
    """Bytes of data that this process has taken, as Linux counts them against such a limit."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
