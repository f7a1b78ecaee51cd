"""Clusters by name or file, for the commands that take one."""

import os
import re
from pathlib import Path

from ..core.cluster import Cluster, fully_connected, read_cluster
from ..core.errors import RequestError

HOST_COPY_BYTES_PER_S = 5e9
"""Assumed rate of a copy between two workers of this host through its memory, each direction: an order of magnitude
for one core, where the runtime measures its own."""
HOST_COPY_LATENCY_S = 60e-6
"""Assumed latency of one message between two processes of a host: a gloo message takes 58 µs one way, measured."""


def find_cluster(name: str) -> Cluster:
    """The cluster of that name, or the file at that path.

    Names: ``cpu:N`` (or ``local:N``), N workers of this host, each with an equal share of its memory.

    Raises:
        RequestError: neither a name nor a readable cluster file.
    """
    if Path(name).exists():
        return read_cluster(name)
    match = re.fullmatch(r"(?:cpu|local):(\d+)", name)
    if match is None:
        raise RequestError(
            f"there is no cluster '{name}': give the path of a cluster file, or cpu:N (local:N) for N "
            "workers of this host"
        )
    count = int(match[1])
    if count < 1:
        raise RequestError(f"'{name}' has {count} workers: a cluster needs at least 1")
    return fully_connected(count, host_memory_bytes() // count, HOST_COPY_BYTES_PER_S, HOST_COPY_LATENCY_S)


def host_memory_bytes() -> int:
    """Physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
