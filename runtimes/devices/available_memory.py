"""The memory that a process can still allocate: of the machine, or under the operating system's limit."""

import os
import sys
from pathlib import Path

_USABLE = 0.95
"""Share of the remaining limit that planning uses: the limit also counts the heap's holes and the interpreter's
memory."""


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of the container's limit if that is less."""
    physical = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")
    except OSError:
        return physical
    return min(physical, int(text)) if text.strip().isdigit() else physical


def bytes_left() -> int | None:
    """Bytes that this process can still allocate under its limit on data (``ulimit -d``); None without a limit."""
    limit = data_limit()
    return None if limit is None else int(_USABLE * max(limit - data_bytes(), 0))


def data_limit() -> int | None:
    """This process's limit on data (``ulimit -d``), in bytes; None without a limit."""
    if sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def data_bytes() -> int:
    """Bytes of data of this process, as Linux counts them against that limit."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
