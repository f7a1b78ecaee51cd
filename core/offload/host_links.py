"""The paths between devices and their hosts: rates, which devices share a link, and how long copies take."""

from collections.abc import Sequence

from attrs import frozen

from ..actions import Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.routing import Hop, path_latency_s, path_rate, reverse
from ..errors import RequestError
from ..plan.memory_policy import StageOffload, TimedCopy, backward_of
from ..plan.plan import Plan


@frozen
class HostLink:
    """The path between one device and its host.

    Args:
        out_bytes_per_s, back_bytes_per_s: rates to the host and back, when nothing else uses the links.
        latency_s: of each copy.
    """

    out_bytes_per_s: float
    back_bytes_per_s: float
    latency_s: float = 0.0

    def slowed(self, share: float) -> "HostLink":
        """The link at a share of its rates."""
        return HostLink(share * self.out_bytes_per_s, share * self.back_bytes_per_s, self.latency_s)

    def out_s(self, size_bytes: float) -> float:
        """Seconds of a copy to the host."""
        return self.latency_s + size_bytes / self.out_bytes_per_s

    def back_s(self, size_bytes: float) -> float:
        """Seconds of a copy from the host."""
        return self.latency_s + size_bytes / self.back_bytes_per_s


@frozen
class HostLinks:
    """The paths between all devices of a pipeline and their hosts.

    Args:
        links: per device along the pipeline; None where it reaches no host.
        groups: devices whose copies cross a link that is too slow for all of them at once, and that link's rate ÷ the
            rate of one device alone. Every device is in one group, most often alone.
    """

    links: tuple[HostLink | None, ...]
    groups: tuple[tuple[tuple[int, ...], float], ...]

    def contended(self) -> "HostLinks":
        """The same links, each at the rate that it has while all devices of its group copy."""
        slower = {device: min(share / len(devices), 1.0) for devices, share in self.groups for device in devices}
        return HostLinks(
            tuple(None if link is None else link.slowed(slower[at]) for at, link in enumerate(self.links)), self.groups
        )


def host_links(plan: Plan, cluster: Cluster) -> HostLinks:
    """The paths between a plan's devices and their hosts; with replicas the slowest of each position.

    Args:
        cluster: its devices in the order of ranks.
    """
    paths = [_path(cluster, rank) for rank in range(plan.mesh.ranks)]
    links = tuple(_slowest([_link(path) for path in paths[device :: plan.devices]]) for device in range(plan.devices))
    return HostLinks(links, tuple(_groups(paths[: plan.devices], links)))


def same_links(devices: int, link: HostLink) -> HostLinks:
    """Equal paths for all devices, of which no two share a link."""
    return HostLinks((link,) * devices, tuple(((device,), float("inf")) for device in range(devices)))


def _path(cluster: Cluster, device: int) -> tuple[Hop, ...]:
    try:
        return cluster.host_path(device)
    except RequestError:
        return ()


def _link(path: Sequence[Hop]) -> HostLink | None:
    if not path:
        return None
    return HostLink(path_rate(path), path_rate(reverse(path)), path_latency_s(path))


def _slowest(found: Sequence[HostLink | None]) -> HostLink | None:
    links = [link for link in found if link is not None]
    if len(links) < len(found):
        return None
    return HostLink(
        min(link.out_bytes_per_s for link in links),
        min(link.back_bytes_per_s for link in links),
        max(link.latency_s for link in links),
    )


def _groups(paths: Sequence[tuple[Hop, ...]], links: Sequence[HostLink | None]) -> list[tuple[tuple[int, ...], float]]:
    """Devices by the link that limits them together, where there is one."""
    users: dict[tuple[str, str], list[int]] = {}
    rates = {(link.a, link.b): min(link.rate(True), link.rate(False)) for path in paths for link, _ in path}
    for device, path in enumerate(paths):
        for link, _ in path:
            users.setdefault((link.a, link.b), []).append(device)
    groups: dict[tuple[int, ...], float] = {}
    grouped: set[int] = set()
    for name, devices in sorted(users.items(), key=lambda item: rates[item[0]] / len(item[1])):
        own = [
            min(found.out_bytes_per_s, found.back_bytes_per_s)
            for device in devices
            if (found := links[device]) is not None
        ]
        if len(devices) > 1 and rates[name] < sum(own) and not grouped & set(devices):
            groups[tuple(devices)] = rates[name] / max(own)
            grouped |= set(devices)
    groups |= {(device,): float("inf") for device in range(len(paths)) if device not in grouped}
    return sorted(groups.items())


def timed_copies(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    offload: Sequence[StageOffload],
    links: HostLinks,
) -> list[list[TimedCopy]]:
    """The copies of each device, with their positions and times.

    Args:
        orders: per device its compute order.
        links: between the devices and their hosts; a device that offloads has one.
    """
    found: list[list[TimedCopy]] = [[] for _ in orders]
    at: dict[int, dict[Action, int]] = {}
    for each in offload:
        device = placement[each.stage]
        if device not in at:
            at[device] = {action: position for position, action in enumerate(orders[device])}
        link = links.links[device]
        assert link is not None
        times = link.out_s(each.bytes), link.back_s(each.bytes)
        for copy in each.copies:
            forward = Action(each.stage, Kind.F, copy.microbatch)
            backward = backward_of(each.stage, copy.microbatch, at[device])
            found[device].append(
                TimedCopy(
                    at[device][forward], at[device][copy.freed_at], at[device][copy.reload_after],
                    at[device][backward], *times, each.bytes,
                )
            )  # fmt: skip
    return found
