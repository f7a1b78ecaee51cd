"""Times messages between devices: every pair and direction alone, and groups that send to all others at once.

Planning has no time for all pairs and measures neighbours only. Every device iterates over the list of all
measurements, and waits if it takes no part in one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import torch
from attrs import field, frozen

from ..backends.contract import Backend, Handle
from ..core.cluster.links.shared import Group
from ..core.errors import RequestError
from ..runtimes.devices.compute import Stopwatch, finished_s
from ..runtimes.launch.team import Team
from ..runtimes.profile.measured_cluster import ACK_BYTES, pair_times

SIZES = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of messages that are sent alone."""
TOGETHER_BYTES = 1 << 20
"""Bytes of a message of a group: at 1 MiB latency has little effect."""
TOGETHER_COUNT = 24
IN_FLIGHT = 2
"""Messages of a pair in flight, so that the rate is that of the link and not of its round trip."""


@frozen
class LinkMeasurements:
    """Measured links.

    Args:
        alone: (sender, receiver) → size of a message → seconds from one to the other.
        together: group → bytes/s from it to all other devices, each to each at once.
    """

    alone: Mapping[tuple[int, int], Mapping[int, float]]
    together: Mapping[Group, float] = field(factory=dict)


def measure_links(
    team: Team,
    device: Callable[[int], torch.device],
    groups: Sequence[Group],
    sizes: Sequence[int] = SIZES,
    repeats: int = 20,
) -> LinkMeasurements:
    """Measure every pair alone, and groups together.

    Args:
        team: the devices; two at least.
        device: device → its torch device.
        groups: groups that send to all others.
        sizes: bytes of messages, multiples of 4: they are float32, which every backend moves.
        repeats: of each size, at least one; the lower quartile counts.

    Returns:
        The same on every rank.

    Raises:
        RequestError: there is one device, or a size is not a multiple of 4.
    """
    if team.size < 2:
        raise RequestError("there is 1 device, and so no link to measure: use at least two ranks, as in --ranks 2")
    odd = next((size for size in sizes if size < 4 or size % 4), None)
    if odd is not None:
        raise RequestError(f"a message size is {odd} bytes: messages are of float32; give multiples of 4")

    def work(number: int) -> tuple[dict[tuple[int, int], dict[int, float]], list[dict[int, list[float]]]]:
        backend = team.backend(number)
        backend.connect(permutations(range(team.size), 2))
        here, alone = device(number), dict[tuple[int, int], dict[int, float]]()
        for pair in permutations(range(team.size), 2):
            _barrier(backend, here)
            if (times := pair_times(backend, here, pair, sizes, repeats)) is not None:
                alone[pair] = times
        return alone, [_together(backend, here, group) for group in groups]

    found = team.everywhere(work)
    pairs = {pair: times for alone, _ in found for pair, times in alone.items()}
    totals = {
        group: total_rate([arrivals for _, those in found for arrivals in those[place].values()])
        for place, group in enumerate(groups)
    }
    return LinkMeasurements({pair: pairs[pair] for pair in sorted(pairs)}, totals)


def total_rate(flows: Sequence[Sequence[float]], message_bytes: int = TOGETHER_BYTES) -> float:
    """Bytes/s of several flows until the first of them has ended.

    Args:
        flows: for each flow the arrival times of its messages, in seconds from the common start.
        message_bytes: of each message; a message in flight at the end counts in part.
    """
    end = min(flow[-1] for flow in flows)
    return sum(_arrived(flow, end) for flow in flows) * message_bytes / end


def _arrived(flow: Sequence[float], end: float) -> float:
    done = sum(1 for arrival in flow if arrival <= end)
    if done == len(flow):
        return float(done)
    before = flow[done - 1] if done else 0.0
    return done + (end - before) / (flow[done] - before)


def _messages(size: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(size // 4, device=device)]


def _barrier(backend: Backend, device: torch.device) -> None:
    """Wait until all devices have called this."""
    others = range(1, backend.devices)
    if backend.device == 0:
        for handle in [backend.receive(_messages(ACK_BYTES, device), other) for other in others]:
            handle.wait()
        for handle in [backend.send(_messages(ACK_BYTES, device), other) for other in others]:
            handle.wait()
    else:
        backend.send(_messages(ACK_BYTES, device), 0).wait()
        backend.receive(_messages(ACK_BYTES, device), 0).wait()


def _together(backend: Backend, device: torch.device, group: Group) -> dict[int, list[float]]:
    """Send from a group to all others, with a thread and a stream for each pair.

    Returns:
        On a receiver: sender → arrival times of its messages, in seconds from the start.
    """
    sends = backend.device in group
    others = [other for other in range(backend.devices) if (other in group) != sends]
    arrivals: dict[int, list[float]] = {} if sends else {other: [] for other in others}
    failures: list[BaseException] = []
    _barrier(backend, device)
    start = time.perf_counter()

    def flow(peer: int) -> None:
        buffers = [_messages(TOGETHER_BYTES, device) for _ in range(IN_FLIGHT)]
        in_flight: deque[Handle] = deque()
        try:
            with Stopwatch(device).active():
                for number in range(TOGETHER_COUNT + IN_FLIGHT):
                    if number >= IN_FLIGHT:
                        in_flight.popleft().wait()
                        if not sends:
                            arrivals[peer].append(finished_s(device) - start)
                    if number < TOGETHER_COUNT:
                        begin = backend.send if sends else backend.receive
                        in_flight.append(begin(buffers[number % IN_FLIGHT], peer))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=flow, args=(peer,), name=f"flow with {peer}") for peer in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return arrivals
