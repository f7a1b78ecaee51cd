"""The bandwidth of a host's memory as a link, which all transfers that read or write it share.

The link leads from the host to a node of its own, and has one rate for both directions together::

    gpu0 ─ pcie0 ─ host0 ══ memory of host0        an offload ends there: it writes; a reload starts there: it reads
                     │
    gpu1 ─ pcie1 ────┘                             a transfer that is staged through the host writes, then reads

So offload, messages and collectives contend for it by the rules of all links, with a rate for each NUMA node. A
transfer between devices on two sockets is staged in the memory of the first socket that it reaches; a transfer through
NICs uses a host's memory only if its path crosses that host.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from ..errors import RequestError
from .routing import Hop, Link, ParallelPath


def memory_links(hosts: Iterable[tuple[str, float | None]]) -> dict[str, Link]:
    """A link for every host whose memory has a rate.

    Args:
        hosts: their names, and the bytes per second of their memory.
    """
    return {
        name: Link(name, f"memory of {name}", rate, 0.0, both_bytes_per_s=rate)
        for name, rate in hosts
        if rate is not None
    }


def staged(path: tuple[Hop, ...], memories: Mapping[str, Link]) -> tuple[Hop, ...]:
    """A path between devices with the memory of the hosts that stage its data: written, then read.

    Args:
        path: the path over links, without memory.
        memories: the memory links of hosts, by the host's name.
    """
    if not memories or isinstance(path, ParallelPath):  # its parts are staged
        return path
    found: list[Hop] = []
    staging = False
    for link, from_a in path:
        found.append((link, from_a))
        memory = memories.get(link.b if from_a else link.a)
        if memory is not None and not staging:
            found += [(memory, True), (memory, False)]
        staging = memory is not None
    return tuple(found)


def into_memory(path: Sequence[Hop], memories: Mapping[str, Link]) -> tuple[Hop, ...]:
    """A path to a host, extended into its memory.

    Args:
        path: the path over links, without memory.
        memories: the memory links of hosts, by the host's name.
    """
    link, from_a = path[-1]
    memory = memories.get(link.b if from_a else link.a)
    return tuple(path) if memory is None else (*path, (memory, True))


def check_memory_rate(name: str, kind: str, rate: float | None) -> None:
    """Check the rate of a hub's memory.

    Raises:
        RequestError: it is not above 0, or the hub is no host.
    """
    if rate is not None and (kind != "host" or not 0 < rate < inf):
        rule = "give a number above 0" if kind == "host" else "only hubs of kind host have memory"
        raise RequestError(f"memory_bytes_per_s of '{name}' is {rate}: {rule}")
