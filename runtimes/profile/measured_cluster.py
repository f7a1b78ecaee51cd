"""A cluster that describes this machine, or these machines: the memory of devices, and measured links.

Links inside a host have the speed of its neighbours, all measured at the same time. Links between hosts have that of
one pair on two hosts, measured alone. Neighbours inside a host are often connected by NVLink, which is ten times as
fast as a network.
"""

import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch

from ...backends.contract import Backend, Pair
from ...backends.kind import identity
from ...core.cluster.cluster import Cluster, Device, fully_connected
from ...core.cluster.links.lines import LineFit, fit_line
from ...core.cluster.routing import Link
from ..devices.available_memory import bytes_left, machine_bytes
from ..devices.compute import finished_s, transfer_s
from ..launch.team import Team

NEIGHBOUR_SIZES = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
NEIGHBOUR_REPEATS = 8
"""Bytes of messages between neighbours, and how often each is sent."""
ROUNDS = 4
"""Number of rounds over all sizes of a pair; each size is measured a few times in a row."""
ACK_BYTES = 4
"""Bytes of an answer."""


def measured_cluster(
    team: Team,
    where: Mapping[int, torch.device],
    host: Callable[[int], str] = lambda device: socket.gethostname(),
) -> Cluster:
    """A cluster that describes the devices of a team: equal memory, and a separate link between every two.

    Args:
        where: device of this process → its torch device.
        host: device of this process → the name of its host.
    """
    memory, ranks = memory_of_each(team, where), team.mesh.ranks
    if ranks == 1:
        return fully_connected(1, memory, 1e9, 1e-6)
    hosts = team.everywhere(host)
    measured = [_measured(team, where, find(hosts, team.size)) for find in (inside_hosts, between_hosts)]
    inside, between = team.decide(lambda: measured)
    by_rank = {team.rank(number): name for number, name in enumerate(hosts)}
    names = [f"device{rank}" for rank in range(ranks)]
    links = []
    for a, b in combinations(range(ranks), 2):
        line = between if inside is None or (between is not None and by_rank[a] != by_rank[b]) else inside
        assert line is not None, "two devices are in one host or in two"
        links.append(Link(names[a], names[b], line.bytes_per_s, line.latency_s))
    return Cluster(tuple(Device(name, memory) for name in names), (), tuple(links))


def inside_hosts(hosts: Sequence[str], size: int) -> list[Pair]:
    """Disjoint pairs of neighbours in one host, by their numbers among all devices.

    Neighbours are next to each other in a pipeline, or replicas of one another if pipelines have one device.

    Args:
        hosts: of all devices, replica by replica.
    """
    found: list[Pair] = []
    for first, second in _neighbours(len(hosts), size):
        if hosts[first] == hosts[second] and not (found and found[-1][1] == first):
            found.append((first, second))
    return found


def between_hosts(hosts: Sequence[str], size: int) -> list[Pair]:
    """One pair on two hosts that messages or sums use, by its numbers among all devices; none if there is one host.

    Args:
        hosts: of all devices, replica by replica.
    """
    across = [pair for pair in _neighbours(len(hosts), size) if hosts[pair[0]] != hosts[pair[1]]]
    replicas = [(first, first + size) for first in range(len(hosts) - size) if hosts[first] != hosts[first + size]]
    return (across or replicas)[:1]


def _neighbours(count: int, size: int) -> list[Pair]:
    return [(a, a + 1) for a in range(count - 1) if size == 1 or (a + 1) % size]


def _measured(team: Team, on: Mapping[int, torch.device], pairs: Sequence[Pair]) -> LineFit | None:
    """The median line of some pairs, all of them measured at the same time; None if there are none."""
    if not pairs:
        return None
    size = team.size

    def work(device: int) -> dict[int, float] | None:
        found = None
        for a, b in pairs:
            across = a // size != b // size  # replicas of one device, not devices of one pipeline
            if (a % size != device) if across else (a // size != team.replica):
                continue
            backend = team.replicas_of(device) if across else team.backend(device)
            assert backend is not None
            pair = (a // size, b // size) if across else (a % size, b % size)
            backend.connect([pair, pair[::-1]])
            if backend.device in pair:
                found = pair_times(backend, on[device], pair)
        return found

    times = [found for found in team.everywhere(work) if found]
    lines = [fit_line(list(each), list(each.values())) for each in times]
    latency_s = statistics.median(line.latency_s for line in lines)
    return LineFit(latency_s, statistics.median(line.bytes_per_s for line in lines), ())


def pair_times(
    backend: Backend,
    device: torch.device,
    pair: Pair,
    sizes: Sequence[int] = NEIGHBOUR_SIZES,
    repeats: int = NEIGHBOUR_REPEATS,
) -> dict[int, float] | None:
    """Measure a pair of devices; both call this together, and other pairs may do so at the same time.

    The times are those of the transport's events around a message; without events, of a round trip with a tiny answer,
    minus half of a tiny round trip.

    Args:
        backend: this device's end of the transport, connected for both directions of the pair.
        pair: sender, receiver.
        sizes: bytes of messages, multiples of 4: they are float32, which every backend moves.
        repeats: of each size, at least one; the lower quartile counts.

    Returns:
        On the sender: size of a message → seconds from the sender to the receiver. None on other devices.
    """
    sender, receiver = pair
    times: dict[int, list[float]] = {size: [] for size in (ACK_BYTES, *sizes)}
    has_events = False
    for count in rounds(repeats):
        for size, found in times.items():
            message, answer = ([torch.zeros(each // 4, device=device)] for each in (size, ACK_BYTES))
            for number in range(count + 1):  # the first one allocates buffers and connects
                if backend.device == receiver:
                    backend.receive(message, sender).wait()
                    backend.send(answer, sender).wait()
                elif backend.device == sender:
                    start = finished_s(device)
                    sent = backend.send(message, receiver)
                    backend.receive(answer, receiver).wait()
                    sent.wait()
                    round_trip, alone = finished_s(device) - start, transfer_s(sent, device)
                    has_events = alone is not None
                    if number:
                        found.append(round_trip if alone is None else alone)
    if backend.device != sender:
        return None
    half = 0.0 if has_events else undisturbed(times[ACK_BYTES]) / 2
    # Tiny messages differ by less than their variation: no message is faster than half of a tiny round trip.
    return {size: max(undisturbed(times[size]) - half, half) for size in sizes}


def rounds(repeats: int) -> list[int]:
    """Repeats of each size in each round. All sizes take turns, so that a disturbance does not affect only one size."""
    count = min(ROUNDS, repeats)
    return [repeats // count + (number < repeats % count) for number in range(count)]


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile: other load makes messages slower, perhaps half of them, and none faster. The minimum would be
    too random."""
    return sorted(times)[(len(times) - 1) // 4]


def memory_of_each(team: Team, where: Mapping[int, torch.device]) -> int:
    """Bytes of memory of each device: an equal share of the machine's, or of its GPU's among all devices on that GPU,
    also those of other processes.

    It is at most what the operating system, or `torch.cuda.set_per_process_memory_fraction`, still allows the process
    with the lowest limit.

    Args:
        where: device of this process → its torch device.
    """
    everywhere = team.everywhere(lambda device: identity(where[device]))

    def available(device: int) -> int:
        here = where[device]
        if here.type == "cuda":
            # Memory that this process has reserved is for its own devices; what is free is for all.
            free, total = torch.cuda.mem_get_info(here)  # without the memory of CUDA contexts and other processes
            reserved, count = torch.cuda.memory_reserved(here), list(where.values()).count(here)
            allowed = int(torch.cuda.get_per_process_memory_fraction(here) * total) // count
            shared = int(free) // everywhere.count(identity(here)) + reserved // count
            return min(shared, allowed)
        left = bytes_left()
        shares = [machine_bytes() // team.mesh.ranks, *([] if left is None else [left // len(team.local)])]
        return min(shares)

    return max(min(team.everywhere(available)), 0)
