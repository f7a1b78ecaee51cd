"""Links that pairs of devices share, found from the throughput while many of them send at the same time.

Every device of a group sends to every device outside it at the same time. The throughput is that of the links between
the two sides: on a tree of links with max-min fair sharing, exactly their minimum cut. A shared link therefore shows as
a group whose throughput is below the minimum cut of the links known so far. The group with the greatest relative
deficit is cut by that link alone, because the deficit of a cut of several links is at most the greatest of theirs.
Adding links in the order of their deficit gives a tree that predicts every set of flows. Links that never limit a flow
are omitted, unless latencies show them.

Latencies show a link between two groups by the four-point condition: every path that crosses it is longer, by the same
amount, than two that do not. (Buneman, "The recovery of trees from measures of dissimilarity", 1971.)
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, frozen

from ...errors import RequestError
from ..cluster import Hub
from ..routing import Link

Group = frozenset[int]
"""Devices by number."""
EXHAUSTIVE = 8
"""Up to this many devices every group is measured: 254 groups of 8 devices."""


def groups_to_measure(hosts: Sequence[str]) -> list[Group]:
    """Groups to measure: their throughput to all others determines which links are shared.

    Args:
        hosts: name of each device's host. With more than `EXHAUSTIVE` devices, only single devices, pairs on one host
            and whole hosts are measured: an uplink of three devices out of eight on a host is then not found.

    Returns:
        Every group with its complement, because the two directions of a link are measured separately.
    """
    everyone = frozenset(range(len(hosts)))
    if len(hosts) <= EXHAUSTIVE:
        found = {frozenset(g) for n in range(1, len(hosts)) for g in itertools.combinations(sorted(everyone), n)}
    else:
        found = {frozenset({device}) for device in everyone}
        found |= {frozenset({a, b}) for a, b in itertools.combinations(sorted(everyone), 2) if hosts[a] == hosts[b]}
        found |= {frozenset(d for d in everyone if hosts[d] == host) for host in hosts}
        found |= {everyone - group for group in found}
        found -= {everyone, frozenset()}
    return sorted(found, key=lambda group: (len(group), sorted(group)))


@frozen
class Cut:
    """The throughput between a group and all other devices.

    Args:
        group: the side without device 0.
        sent_bytes_per_s: measured, from the group to the others.
        received_bytes_per_s: measured, from the others to the group.
        fitted_bytes_per_s: the minimum cut of the links, in each direction.
    """

    group: Group
    sent_bytes_per_s: float
    received_bytes_per_s: float
    fitted_bytes_per_s: float

    @property
    def error(self) -> float:
        """Relative error of the links' throughput; the greater one of both directions."""
        measured = (self.sent_bytes_per_s, self.received_bytes_per_s)
        return max(abs(self.fitted_bytes_per_s - one) / one for one in measured)


@frozen
class SharedLinks:
    """A tree of links between devices.

    Args:
        hubs: the inner nodes of the tree.
        links: the links of the tree.
        shared: name of each hub → the devices that share its link towards device 0.
        cuts: all simultaneous measurements, with residuals.
    """

    hubs: tuple[Hub, ...]
    links: tuple[Link, ...]
    shared: Mapping[str, Group]
    cuts: tuple[Cut, ...]


@define
class _Tree:
    """Groups that are nested or disjoint, each with the rate of the link that leads out of it.

    Args:
        devices: how many there are.
        rates: group without device 0 → rate. It has every single device, and the group of all devices but 0.
    """

    devices: int
    rates: dict[Group, float]

    def fits(self, group: Group) -> bool:
        """Whether a group is inside, around or disjoint from every other one."""
        return all(group <= other or other <= group or not group & other for other in self.rates)

    def parent(self, group: Group) -> Group:
        """The smallest group that contains this one; all devices but 0 contain every group."""
        return min((other for other in self.rates if group < other), key=len)

    def cut(self, group: Group) -> float:
        """The minimum cut between a group and all other devices."""
        sides = self._sides(frozenset(range(1, self.devices)), group)
        rate = self.rates[frozenset(range(1, self.devices))]
        return min(sides[1], sides[0] + rate) if 0 in group else min(sides[0], sides[1] + rate)

    def _sides(self, at: Group, group: Group) -> tuple[float, float]:
        """Minimum cuts inside ``at``, with its hub on the others' side, and with its hub on the group's side."""
        if len(at) == 1:
            return (float("inf"), 0.0) if at <= group else (0.0, float("inf"))
        apart = together = 0.0
        for child in self._children(at):
            others, own = self._sides(child, group)
            apart += min(others, own + self.rates[child])
            together += min(own, others + self.rates[child])
        return apart, together

    def _children(self, at: Group) -> list[Group]:
        inside = [group for group in self.rates if group < at]
        return [group for group in inside if not any(group < other for other in inside)]


def shared_links(
    names: Sequence[str],
    totals: Mapping[Group, float],
    alone: Mapping[tuple[int, int], float],
    latencies_s: Sequence[Sequence[float]],
    tolerance: float = 0.1,
) -> SharedLinks:
    """The tree of links that explains the simultaneous measurements.

    Args:
        names: of the devices.
        totals: group → bytes/s from it to all others at the same time; at least single devices and their complements.
        alone: (sender, receiver) → bytes/s while no other pair sends. No link is slower than a pair that crosses it: if
            many pairs together reach less than one alone (processes that wait for a processor), residuals show it.
        latencies_s: from each device to each, while no other pair sends.
        tolerance: a group has a shared link if its throughput is this share below the minimum cut of the links known so
            far. A latency step is a link if it is above this share of the median latency.

    Raises:
        RequestError: there are fewer than two devices, or a single device was not measured.
    """
    count = len(names)
    everyone, but_first = frozenset(range(count)), frozenset(range(1, count))
    single = [frozenset({device}) for device in range(1, count)]
    measured = {group: _both(totals, group, everyone) for group in totals if 0 not in group}
    missing = [group for group in (*single, but_first) if measured.get(group) is None]
    if count < 2 or missing:
        raise RequestError(f"devices {[sorted(group) for group in missing]} of {count} were not measured: measure all")
    rates = {
        group: max([rate, *(one for (a, b), one in alone.items() if (a in group) != (b in group))])
        for group, rate in measured.items()
        if rate is not None
    }
    tree = _Tree(count, {group: rates[group] for group in (*single, but_first)})
    _add_shared(tree, rates, tolerance)
    _add_steps(tree, _symmetric(latencies_s), tolerance)
    return _result(tree, names, totals, _symmetric(latencies_s))


def _both(totals: Mapping[Group, float], group: Group, everyone: Group) -> float | None:
    """The mean of both directions; None if one was not measured."""
    other = totals.get(everyone - group)
    return None if other is None else (totals[group] + other) / 2


def _add_shared(tree: _Tree, rates: Mapping[Group, float], tolerance: float) -> None:
    """Add the groups whose throughput is below the minimum cut, in the order of their relative deficit."""
    while True:
        candidates = [
            (round(rate / tree.cut(group), 9), rate, len(group), sorted(group))
            for group, rate in rates.items()
            if group not in tree.rates and tree.fits(group)
        ]
        if not candidates or min(candidates)[0] >= 1 - tolerance:
            return
        _, rate, _, group = min(candidates)
        tree.rates[frozenset(group)] = rate


def _add_steps(tree: _Tree, latencies: Sequence[Sequence[float]], tolerance: float) -> None:
    """Add the links that latencies show; only of few devices, because every group of them is compared."""
    if tree.devices > EXHAUSTIVE:
        return
    pairs = sorted(latencies[a][b] for a, b in itertools.combinations(range(tree.devices), 2))
    least = tolerance * pairs[len(pairs) // 2]
    for size in range(2, tree.devices - 1):
        for members in itertools.combinations(range(1, tree.devices), size):
            group = frozenset(members)
            if group in tree.rates or not tree.fits(group):
                continue
            if _step(group, latencies) > least:
                tree.rates[group] = tree.cut(group)


def _step(group: Iterable[int], latencies: Sequence[Sequence[float]]) -> float:
    """The latency that all paths between a group and the others have in common: its isolation index."""
    inside = set(group)
    outside = [device for device in range(len(latencies)) if device not in inside]
    return min(
        (max(latencies[i][k] + latencies[j][m], latencies[i][m] + latencies[j][k]) - latencies[i][j] - latencies[k][m])
        / 2
        for i, j in itertools.combinations_with_replacement(sorted(inside), 2)
        for k, m in itertools.combinations_with_replacement(outside, 2)
    )


def _symmetric(latencies: Sequence[Sequence[float]]) -> list[list[float]]:
    """A link has one latency for both directions."""
    size = range(len(latencies))
    return [[0.0 if a == b else (latencies[a][b] + latencies[b][a]) / 2 for b in size] for a in size]


def _result(
    tree: _Tree, names: Sequence[str], totals: Mapping[Group, float], latencies: Sequence[Sequence[float]]
) -> SharedLinks:
    everyone, but_first = frozenset(range(tree.devices)), frozenset(range(1, tree.devices))
    groups = list(tree.rates)
    inner = sorted((g for g in groups if len(g) > 1 and g != but_first), key=lambda g: (len(g), sorted(g)))
    hub = {group: f"shared{number}" for number, group in enumerate(inner)} | {but_first: "middle"}
    ends = [_ends(tree, group, names, hub) for group in groups]
    steps = _latencies(groups, latencies)
    links = [Link(a, b, tree.rates[group], step) for (a, b), group, step in zip(ends, groups, steps, strict=True)]
    cuts = [
        Cut(group, totals[group], totals[everyone - group], tree.cut(group))
        for group in totals
        if 0 not in group and everyone - group in totals
    ]
    hubs = [Hub(hub[group]) for group in inner] + ([Hub("middle")] if tree.devices > 2 else [])
    return SharedLinks(tuple(hubs), tuple(links), {hub[group]: group for group in inner}, tuple(cuts))


def _ends(tree: _Tree, group: Group, names: Sequence[str], hub: Mapping[Group, str]) -> tuple[str, str]:
    """The two ends of the link that leads out of a group; that of all but device 0 leads to device 0."""
    inside = names[min(group)] if len(group) == 1 else hub[group]
    outer = len(group) == tree.devices - 1
    return inside, names[0] if outer else hub[tree.parent(group)]


def _latencies(groups: Sequence[Group], latencies: Sequence[Sequence[float]]) -> list[float]:
    """Latencies of links, none below 0, with the least squared relative error of their sums along paths."""
    import numpy
    from scipy.optimize import lsq_linear

    pairs = list(itertools.combinations(range(len(latencies)), 2))
    scale = max(latencies[a][b] for a, b in pairs) or 1.0
    weights = [scale / max(latencies[a][b], 1e-3 * scale) for a, b in pairs]
    rows = [
        [weight * float(len(group & {a, b}) == 1) for group in groups]
        for (a, b), weight in zip(pairs, weights, strict=True)
    ]
    wanted = [weight * latencies[a][b] / scale for (a, b), weight in zip(pairs, weights, strict=True)]
    found = lsq_linear(numpy.array(rows), numpy.array(wanted), bounds=(0, numpy.inf), method="bvls").x
    return [float(value) * scale for value in found]
