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

from ...backends.contract import Backend, Handle, Pair
from ...core.cluster.links.shared import Group
from ...core.errors import RequestError
from ..devices.compute import Stopwatch, finished_s, transfer_s
from ..launch.team import Team

SIZES = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of messages that are sent alone."""
NEIGHBOUR_SIZES = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
NEIGHBOUR_REPEATS = 8
"""Bytes of messages between neighbours, and how often each is sent."""
TOGETHER_BYTES = 1 << 20
"""Bytes of a message of a group: at 1 MiB latency has little effect."""
TOGETHER_COUNT = 24
ROUNDS = 4
"""Number of rounds over all sizes of a pair; each size is measured a few times in a row."""
IN_FLIGHT = 2
"""Messages of a pair in flight, so that the rate is that of the link and not of its round trip."""
_ACK_BYTES = 4


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
        bench = _Bench(backend, device(number))
        alone = {
            pair: found
            for pair in permutations(range(team.size), 2)
            if (found := bench.barrier().alone(pair, sizes, repeats)) is not None
        }
        return alone, [bench.together(group) for group in groups]

    found = team.everywhere(work)
    pairs = {pair: times for alone, _ in found for pair, times in alone.items()}
    totals = {
        group: total_rate([arrivals for _, those in found for arrivals in those[place].values()])
        for place, group in enumerate(groups)
    }
    return LinkMeasurements({pair: pairs[pair] for pair in sorted(pairs)}, totals)


def pair_times(
    backend: Backend,
    device: torch.device,
    pair: Pair,
    sizes: Sequence[int] = NEIGHBOUR_SIZES,
    repeats: int = NEIGHBOUR_REPEATS,
) -> dict[int, float] | None:
    """Measure a pair of devices; both call this together, and other pairs may do so at the same time.

    Args:
        backend: this device's end of the transport, connected for both directions of the pair.
        device: its torch device.
        pair: sender, receiver.
        sizes: bytes of messages, multiples of 4.
        repeats: of each size; the lower quartile counts.

    Returns:
        On the sender: size of a message → seconds from the sender to the receiver. None on the receiver.
    """
    return _Bench(backend, device).alone(pair, sizes, repeats)


def rounds(repeats: int) -> list[int]:
    """Repeats of each size in each round. All sizes take turns, so that a disturbance does not affect only one size."""
    count = min(ROUNDS, repeats)
    return [repeats // count + (number < repeats % count) for number in range(count)]


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile: other load makes messages slower, perhaps half of them, and none faster. The minimum would be
    too random."""
    return sorted(times)[(len(times) - 1) // 4]


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


class _Bench:
    """One device's part of the measurements.

    Args:
        backend: its end of the transport.
        device: its torch device.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._has_events = False

    def _tensor(self, size: int) -> torch.Tensor:
        return torch.zeros(size // 4, device=self._device)

    def barrier(self) -> "_Bench":
        """Wait until all devices have called this; returns this object."""
        here, others = self._backend.device, range(1, self._backend.devices)
        if here == 0:
            for handle in [self._backend.receive([self._tensor(_ACK_BYTES)], other) for other in others]:
                handle.wait()
            for handle in [self._backend.send([self._tensor(_ACK_BYTES)], other) for other in others]:
                handle.wait()
        else:
            self._backend.send([self._tensor(_ACK_BYTES)], 0).wait()
            self._backend.receive([self._tensor(_ACK_BYTES)], 0).wait()
        return self

    def alone(self, pair: tuple[int, int], sizes: Sequence[int], repeats: int) -> dict[int, float] | None:
        """One-way times of a pair's messages, at the sender, from the transport's events around them.

        Without events it is a round trip with a tiny answer, minus half of a tiny round trip.
        """
        sender, receiver = pair
        times: dict[int, list[float]] = {size: [] for size in (_ACK_BYTES, *sizes)}
        for count in rounds(repeats):
            for size, found in times.items():
                if self._backend.device == sender:
                    found.extend(self._round_trips(receiver, size, count))
                elif self._backend.device == receiver:
                    self._answer(sender, size, count)
        if self._backend.device != sender:
            return None
        if self._has_events:
            return {size: undisturbed(times[size]) for size in sizes}
        half = undisturbed(times[_ACK_BYTES]) / 2
        # Tiny messages differ by less than their variation: no message is faster than half of a tiny round trip.
        return {size: max(undisturbed(times[size]) - half, half) for size in sizes}

    def _answer(self, sender: int, size: int, count: int) -> None:
        message, answer = [self._tensor(size)], [self._tensor(_ACK_BYTES)]
        for _ in range(count + 1):
            self._backend.receive(message, sender).wait()
            self._backend.send(answer, sender).wait()

    def _round_trips(self, receiver: int, size: int, count: int) -> list[float]:
        message, answer, times = [self._tensor(size)], [self._tensor(_ACK_BYTES)], []
        for _ in range(count + 1):
            start = finished_s(self._device)
            sent = self._backend.send(message, receiver)
            self._backend.receive(answer, receiver).wait()
            sent.wait()
            round_trip = finished_s(self._device) - start
            alone = transfer_s(sent, self._device)
            self._has_events = alone is not None
            times.append(round_trip if alone is None else alone)
        return times[1:]  # the first one allocates buffers and connects

    def together(self, group: Group) -> dict[int, list[float]]:
        """Send from a group to all others, with a thread and a stream for each pair.

        Returns:
            On a receiver: sender → arrival times of its messages, in seconds from the start.
        """
        here = self._backend.device
        others = [device for device in range(self._backend.devices) if (device in group) != (here in group)]
        arrivals: dict[int, list[float]] = {}
        flow = self._sends if here in group else self._receives
        failures: list[BaseException] = []
        self.barrier()
        start = time.perf_counter()

        def body(peer: int) -> None:
            try:
                with Stopwatch(self._device).active():
                    found = flow(peer, start)
                if found:
                    arrivals[peer] = found
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=body, args=(peer,), name=f"flow with {peer}") for peer in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return arrivals

    def _sends(self, peer: int, start: float) -> list[float]:
        message = [self._tensor(TOGETHER_BYTES)]
        _keep_in_flight(lambda: self._backend.send(message, peer), lambda: None)
        return []

    def _receives(self, peer: int, start: float) -> list[float]:
        arrivals: list[float] = []
        buffers = [[self._tensor(TOGETHER_BYTES)] for _ in range(IN_FLIGHT)]
        turn = iter(range(TOGETHER_COUNT))
        _keep_in_flight(
            lambda: self._backend.receive(buffers[next(turn) % IN_FLIGHT], peer),
            lambda: arrivals.append(finished_s(self._device) - start),
        )
        return arrivals


def _keep_in_flight(begin: Callable[[], Handle], done: Callable[[], None]) -> None:
    """Keep ``IN_FLIGHT`` messages in flight until all have ended."""
    handles: deque[Handle] = deque()
    for _ in range(TOGETHER_COUNT):
        if len(handles) == IN_FLIGHT:
            handles.popleft().wait()
            done()
        handles.append(begin())
    for handle in handles:
        handle.wait()
        done()
