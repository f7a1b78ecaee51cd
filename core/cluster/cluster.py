"""A cluster: devices, the hubs between them and the links that they share. Documents of ``panpipe.cluster/1``.

The bandwidth of a host's memory is a link, too, which all transfers that read or write it share. It leads from the host
to a node of its own, and has one rate for both directions together::

    gpu0 ─ pcie0 ─ host0 ══ memory of host0        an offload ends there: it writes; a reload starts there: it reads
                     │
    gpu1 ─ pcie1 ────┘                             a transfer that is staged through the host writes, then reads

So offload, messages and collectives contend for it by the rules of all links, with a rate for each NUMA node. A
transfer between devices on two sockets is staged in the memory of the first socket that it reaches; a transfer through
NICs uses a host's memory only if its path crosses that host.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

import cattrs
from attrs import evolve, field, frozen
from cattrs.gen import override

from ..documents import converter, omit_at_default, read_document, to_json
from ..errors import RequestError
from ..files.limits import MOST_DEVICES, check_seconds
from .device_type import DeviceType
from .routing import Hop, Link, Router, path_latency_s, path_rate

FORMAT = "panpipe.cluster/1"
HUB_KINDS = ("switch", "pcie", "host", "nic")
MOST_CONNECTED = 1024
"""Devices with a link between every two: half a million links."""


@frozen
class Device:
    """A device that computes.

    Args:
        name: unique among devices and hubs.
        memory_bytes: the memory that panpipe may use; no reserve is subtracted from it.
        type: a name from the catalogue or of the cluster's own types, or None where the operator graph already carries
            times.
        forwards: whether transfers between other devices may be routed through it.
    """

    name: str
    memory_bytes: int
    type: str | None = None
    forwards: bool = False


@frozen
class Hub:
    """A place where links meet.

    Args:
        name: unique among devices and hubs.
        kind: ``switch`` (NVSwitch, a switch of the network), ``pcie`` (a PCIe switch or root port), ``host`` (a socket
            and its memory) or ``nic``. Paths between devices may not turn around among the kinds ``pcie`` and ``nic``.
        memory_bytes: for a host, the bytes that plans may offload to it; None for no limit.
        memory_bytes_per_s: for a host, the rate of its memory, for reads and writes together; None for no limit.
    """

    name: str
    kind: str = "switch"
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None


def _hubs(hubs: tuple[Hub | str, ...]) -> tuple[Hub, ...]:
    return tuple(Hub(hub) if isinstance(hub, str) else hub for hub in hubs)


@frozen(slots=False, cache_hash=True)
class Cluster:
    """Devices, in the order that plans number them, with hubs and links.

    Args:
        devices: the devices, in the order of their numbers.
        hubs: where links meet; a bare name is a switch.
        links: between devices and hubs, at most one between any two.
        types: device types that the catalogue does not have.

    Raises:
        RequestError: a name is used twice, a hub's kind is unknown, a hub of another kind than host has memory or a
            rate of it, two links join the same ends, an end of a link is unknown, or a rate, latency or memory is not
            positive.
    """

    devices: tuple[Device, ...]
    hubs: tuple[Hub, ...] = field(default=(), converter=_hubs)
    links: tuple[Link, ...] = ()
    types: tuple[DeviceType, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.devices:
            raise RequestError("the cluster has no devices: give it at least one")
        if len(self.devices) > MOST_DEVICES:
            raise RequestError(
                f"the cluster has {len(self.devices)} devices: at most {MOST_DEVICES} are supported; give fewer"
            )
        counts = Counter([device.name for device in self.devices] + [hub.name for hub in self.hubs])
        memories = Counter(link.b for link in self.memories.values())
        for what, found in (("", counts + memories), ("device type ", Counter(kind.name for kind in self.types))):
            twice = next((name for name, count in found.items() if count > 1), None)
            if twice is not None:
                raise RequestError(f"{what}'{twice}' appears twice in the cluster: names are unique; rename one")
        for device in self.devices:
            if device.memory_bytes <= 0:
                raise RequestError(f"memory_bytes of '{device.name}' is {device.memory_bytes}: it must be above 0")
        for hub in self.hubs:
            if hub.kind not in HUB_KINDS:
                raise RequestError(f"hub '{hub.name}' has kind '{hub.kind}': give one of {', '.join(HUB_KINDS)}")
            if hub.memory_bytes is not None and (hub.kind != "host" or hub.memory_bytes < 0):
                rule = "it must be at least 0" if hub.kind == "host" else "only hubs of kind host have memory"
                raise RequestError(f"memory_bytes of '{hub.name}' is {hub.memory_bytes}: {rule}")
            rate = hub.memory_bytes_per_s
            if rate is not None and (hub.kind != "host" or not 0 < rate < inf):
                rule = "give a number above 0" if hub.kind == "host" else "only hubs of kind host have memory"
                raise RequestError(f"memory_bytes_per_s of '{hub.name}' is {rate}: {rule}")
        _check_links(self.links, counts)

    @cached_property
    def _router(self) -> Router:
        names = [device.name for device in self.devices] + [hub.name for hub in self.hubs]
        kinds = [None for _ in self.devices] + [hub.kind for hub in self.hubs]
        forwarding = {number for number, device in enumerate(self.devices) if device.forwards}
        return Router(names, kinds, self.links, forwarding)

    @cached_property
    def _paths(self) -> dict[tuple[int, int | None], tuple[Hop, ...]]:
        """Paths that were searched: device, and the other device; None for the device's host."""
        return {}

    @cached_property
    def memories(self) -> dict[str, Link]:
        """The memory of every host that has a rate, as a link (see the module), by the host's name."""
        return {
            hub.name: Link(hub.name, f"memory of {hub.name}", rate, 0.0, both_bytes_per_s=rate)
            for hub in self.hubs
            if hub.kind == "host" and (rate := hub.memory_bytes_per_s) is not None
        }

    def path(self, src: int, dst: int) -> tuple[Hop, ...]:
        """Links from device ``src`` to device ``dst``, each with its direction (True from a to b).

        The path with the least latency; of equal ones, one with the fewest links (see :mod:`.routing`). It never turns
        around at PCIe switches or NICs: without NVLink a transfer is staged through a host, whose memory it crosses
        twice. It crosses other devices only if they forward.

        Raises:
            RequestError: nothing connects them.
        """
        if (src, dst) not in self._paths:
            path = self._router.path(src, dst)
            if path is None:
                ends = f"device {src} ('{self.devices[src].name}') to {dst} ('{self.devices[dst].name}')"
                raise RequestError(
                    f"no link connects {ends}: add one; paths cross another device only if the cluster file has "
                    '"forwards": true for it'
                )
            self._paths[src, dst] = _staged(path, self.memories)
        return self._paths[src, dst]

    def arranged(self, order: Sequence[int]) -> "Cluster":
        """The same cluster with its devices in another order; the path between any two devices stays the same.

        Args:
            order: all device numbers, each once.
        """
        other = evolve(self, devices=tuple(self.devices[number] for number in order))
        vars(other)["_router"] = self._router.arranged(order)
        return other

    def host_path(self, device: int) -> tuple[Hop, ...]:
        """Links from a device to the nearest host and into its memory: the path of an offload.

        Each link has its direction (True from a to b).

        Raises:
            RequestError: no host is connected to it.
        """
        if (device, None) not in self._paths:
            path = self._router.nearest(device, "host")
            if path is None:
                name = self.devices[device].name
                raise RequestError(f"device {device} ('{name}') reaches no hub of kind host: add one with a link to it")
            link, from_a = path[-1]
            memory = self.memories.get(link.b if from_a else link.a)
            self._paths[device, None] = path if memory is None else (*path, (memory, True))
        return self._paths[device, None]

    def host_of(self, device: int) -> Hub:
        """The nearest host of a device. Raises RequestError if none is connected to it."""
        ends = {end for link, _ in self.host_path(device) for end in (link.a, link.b)}
        # A path to the nearest host crosses no other host.
        return next(hub for hub in self.hubs if hub.name in ends and hub.kind == "host")

    def transfer_s(self, src: int, dst: int, size_bytes: float) -> float:
        """Seconds of one transfer on idle links: the sum of latencies, plus the bytes at the slowest link's rate."""
        if src == dst:
            return 0.0
        path = self.path(src, dst)
        return path_latency_s(path) + size_bytes / path_rate(path)


def _staged(path: tuple[Hop, ...], memories: Mapping[str, Link]) -> tuple[Hop, ...]:
    """A path between devices with the memory of the hosts that stage its data: written, then read."""
    if not memories:
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


def _check_links(links: tuple[Link, ...], places: Counter[str]) -> None:
    joined: set[frozenset[str]] = set()
    for link in links:
        what = f"link {link.a} – {link.b}"
        unknown = next((end for end in (link.a, link.b) if end not in places), None)
        if unknown is not None:
            raise RequestError(f"{what} names '{unknown}', which is neither a device nor a hub: add it, or correct it")
        if not all(rate > 0 for rate in _rates(link)) or not 0 <= link.latency_s < inf:
            raise RequestError(
                f"{what} has {', '.join(map(str, _rates(link)))} bytes/s and {link.latency_s} s: "
                "a rate must be above 0 and a latency at least 0"
            )
        check_seconds(f"latency_s of {what}", link.latency_s)
        ends = frozenset((link.a, link.b))
        if ends in joined or len(ends) == 1:
            fault = "joins a place to itself" if len(ends) == 1 else "appears twice"
            raise RequestError(f"{what} {fault}: give one link for each pair of places, at the rate of all its cables")
        joined.add(ends)


def _rates(link: Link) -> list[float]:
    """The rates that a link states: in each direction, back, both directions together."""
    rates = (link.bytes_per_s, link.back_bytes_per_s, link.both_bytes_per_s)
    return [rate for rate in rates if rate is not None]


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises RequestError if it is not one."""
    cluster = read_document(path, FORMAT, Cluster)
    for link in cluster.links:
        endless = next((rate for rate in _rates(link) if not isfinite(rate)), None)
        if endless is not None:
            raise RequestError(f"{path}: link {link.a} – {link.b} has {endless} bytes/s: give a number")
    return cluster


def cluster_json(cluster: Cluster) -> str:
    """The cluster document of a cluster."""
    return to_json(FORMAT, cluster)


def with_limit(cluster: Cluster, limit: float | None) -> Cluster:
    """The cluster whose devices have at most ``limit`` bytes of memory; the same for None."""
    if limit is None:
        return cluster
    devices = (evolve(device, memory_bytes=min(device.memory_bytes, int(limit))) for device in cluster.devices)
    return evolve(cluster, devices=tuple(devices))


def fully_connected(count: int, memory_bytes: int, bytes_per_s: float, latency_s: float) -> Cluster:
    """``count`` equal devices with a separate link between every two.

    Raises:
        RequestError: there are more than `MOST_CONNECTED` devices.
    """
    if count > MOST_CONNECTED:
        raise RequestError(
            f"the cluster has {count} devices with a link between every two: at most {MOST_CONNECTED} are supported; "
            "use fewer"
        )
    names = [f"device{i}" for i in range(count)]
    links = [Link(a, b, bytes_per_s, latency_s) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(tuple(Device(name, memory_bytes) for name in names), (), tuple(links))


def _read_hub(value: Any, _: type) -> Hub:
    """A hub as a file has it: an object, or a bare name for a switch."""
    return Hub(value) if isinstance(value, str) else _hub_object(value, Hub)


def _read_rate(value: Any, kind: Any) -> float:
    """A link's rate as a plan's document has it: null for a link without a limit, as JSON has no infinity."""
    return inf if value is None else converter.structure(value, float)


def _written_rate(rate: float) -> float | None:
    return rate if isfinite(rate) else None


def _write_hub(hub: Hub) -> Any:
    return hub.name if hub.kind == "switch" else _hub_document(hub)


_later = override(omit_if_default=True)
_hub_document = cattrs.gen.make_dict_unstructure_fn(Hub, converter, memory_bytes=_later, memory_bytes_per_s=_later)
_hub_object = cattrs.gen.make_dict_structure_fn(Hub, converter)
converter.register_structure_hook(Hub, _read_hub)
converter.register_unstructure_hook(Hub, _write_hub)
omit_at_default(Device, "forwards")
converter.register_unstructure_hook(
    Link,
    cattrs.gen.make_dict_unstructure_fn(
        Link, converter, bytes_per_s=override(unstruct_hook=_written_rate), back_bytes_per_s=_later,
        both_bytes_per_s=_later,
    ),
)  # fmt: skip
converter.register_structure_hook(
    Link, cattrs.gen.make_dict_structure_fn(Link, converter, bytes_per_s=override(struct_hook=_read_rate))
)
omit_at_default(Cluster, "types")
