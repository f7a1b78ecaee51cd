"""``panpipe profile links``: the measured time of messages between ranks, alone and together, as a cluster.

Every pair and direction is measured alone, and groups that send to all others at once. Planning has no time for all
pairs and measures neighbours only. Every device iterates over the list of all measurements, and waits if it takes no
part in one.
"""

import datetime
import os
import platform
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from ..backends.contract import Backend, Handle
from ..backends.registry import find_backend
from ..core.cluster.cluster import Cluster, Device, cluster_json
from ..core.cluster.links.lines import LineFit, fit_line
from ..core.cluster.links.shared import Group, SharedLinks, groups_to_measure, shared_links
from ..core.cluster.routing import path_rate
from ..core.documents import as_plain
from ..core.errors import RequestError
from ..core.files.write import write_text
from ..core.wording import counted
from ..runtimes.devices.available_memory import machine
from ..runtimes.devices.compute import Stopwatch, finished_s
from ..runtimes.devices.devices import device_of_rank
from ..runtimes.launch.launch import make_team
from ..runtimes.launch.team import Team
from ..runtimes.profile.measured_cluster import ACK_BYTES, memory_of_each, pair_times
from ..runtimes.profile.offload_rates import MeasuredCopy, host_copies
from .output import bytes_text, note, print_json, print_records, print_table, rate_text, seconds_text


@frozen
class LinkProfile:
    """The measured links, and the cluster that is fitted to them.

    Args:
        alone: (sender, receiver) → latency and rate of the pair, fitted to messages without other traffic.
        tree: the shared links, with the measurements of several pairs at the same time.
    """

    cluster: Cluster
    alone: Mapping[tuple[int, int], LineFit]
    tree: SharedLinks
    copies: Sequence[MeasuredCopy]
    what: str


def profile_links(
    where: torch.device, kind: str, ranks: int | None, backend: str | None, repeats: int, out: Path | None, json: bool
) -> int:
    """Measure the links between ranks and print them. A process that is not a rank starts ranks that do this.

    Args:
        kind: the type of the devices in the file, from the catalogue.
        ranks: how many to start; None under torchrun.
        backend: the transport; that of training by default.

    Returns:
        The exit status.
    """
    if "RANK" not in os.environ:
        return _start(ranks, backend)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks is not None and ranks != size:
        raise RequestError(f"--ranks is {ranks} and the job has {size} ranks: leave it out under torchrun")
    found = _measure(where, kind, backend, repeats)
    if os.environ["RANK"] != "0":
        return 0
    if out is not None:
        write_text(out, cluster_json(found.cluster))
    if json:
        print_json(_answer(found))
    else:
        _show(found)
        if out is not None:
            print(f"\nWritten to {out}: plan with --cluster {out}")
    return 0


def _start(ranks: int | None, backend: str | None) -> int:
    """Run this command on ranks of this machine. Options that every rank would refuse are refused here, once."""
    if ranks is None or ranks < 2:
        raise RequestError(
            "links are measured between ranks, and "
            f"{'this process is not one' if ranks is None else f'--ranks is {ranks}'}: "
            "give --ranks 2 or more, or start panpipe with torchrun --module panpipe"
        )
    if backend is not None and find_backend(backend).ranks is None:
        raise RequestError(
            f"links are measured between ranks, and backend '{backend}' connects threads: use --backend gloo"
        )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = sys.argv[1:] if sys.argv[1:2] == ["profile"] else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, "--module", "panpipe", *given], env=environment, check=False).returncode


def _measure(where: torch.device, kind: str, backend: str | None, repeats: int) -> LinkProfile:
    here = where
    if where.type == "cuda":
        here = device_of_rank(None, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        torch.cuda.set_device(here)  # NCCL connects the current device
    team = make_team(None, backend, where.type)
    try:
        hosts = team.everywhere(lambda _: platform.node())
        if team.local == (0,):
            note(f"measuring links between {team.size} ranks over {team.kind.name}")
        measured = measure_links(team, lambda _: here, groups_to_measure(hosts), repeats=repeats)
        memory = memory_of_each(team, dict.fromkeys(team.local, here))
        (copies, *_) = team.everywhere(lambda device: host_copies(here) if device == 0 else [])
    finally:
        team.close()
    alone = {pair: fit_line(list(times), list(times.values())) for pair, times in measured.alone.items()}
    names = [f"device{number}" for number in range(team.size)]
    latencies = [[alone[a, b].latency_s if a != b else 0.0 for b in range(team.size)] for a in range(team.size)]
    tree = shared_links(names, measured.together, {pair: fit.bytes_per_s for pair, fit in alone.items()}, latencies)
    cluster = Cluster(tuple(Device(name, memory, kind) for name in names), tree.hubs, tree.links)
    what = machine(where), counted(len(set(hosts)), "host"), team.kind.name, datetime.date.today().isoformat()
    return LinkProfile(cluster, alone, tree, copies, ", ".join(what))


def _answer(found: LinkProfile) -> dict[str, Any]:
    return {
        "machine": found.what,
        "alone": [
            {"from": a, "to": b, **as_plain(fit), "predicted_bytes_per_s": path_rate(found.cluster.path(a, b))}
            for (a, b), fit in found.alone.items()
        ],
        "together": [{**as_plain(cut), "group": sorted(cut.group), "error": cut.error} for cut in found.tree.cuts],
        "shared": {hub: sorted(group) for hub, group in found.tree.shared.items()},
        "links": as_plain(found.cluster.links),
        "host_copies": [
            {"to_host": copy.to_host, "pinned": copy.pinned, **as_plain(copy.line)} for copy in found.copies
        ],
    }


def _show(found: LinkProfile) -> None:
    print(found.what)
    rows = [
        (
            f"{a} → {b}",
            seconds_text(fit.latency_s),
            rate_text(fit.bytes_per_s),
            rate_text(path_rate(found.cluster.path(a, b))),
            *(f"{point.error:.0%}" for point in fit.points),
        )
        for (a, b), fit in found.alone.items()
    ]
    sizes = [bytes_text(point.bytes) for point in next(iter(found.alone.values())).points]
    print_table("Alone, with the residual of each size", ("pair", "latency", "rate", "in the file", *sizes), rows)
    print_records(
        "Together: a group to all others at once, and back", found.tree.cuts,
        {"group": lambda cut: ", ".join(map(str, sorted(cut.group))), "sent": "sent_bytes_per_s GB/s",
         "received": "received_bytes_per_s GB/s", "fitted": "fitted_bytes_per_s GB/s",
         "error": lambda cut: f"{cut.error:.0%}"},
    )  # fmt: skip
    for link in found.cluster.links:
        group = next((found.tree.shared[end] for end in (link.a, link.b) if end in found.tree.shared), None)
        shared = f", shared by {', '.join(map(str, sorted(group)))}" if group else ""
        print(f"{link.a} – {link.b}: {rate_text(link.bytes_per_s)}, {seconds_text(link.latency_s)}{shared}")
    for copy in found.copies:
        way = f"{'to' if copy.to_host else 'from'} {'pinned' if copy.pinned else 'pageable'} host memory"
        print(f"{way}: {rate_text(copy.line.bytes_per_s)}, {seconds_text(copy.line.latency_s)}")


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
        sizes: bytes of messages, multiples of 4: they are float32, which every backend moves.
        repeats: of each size, at least one; the lower quartile counts.

    Returns:
        The same on every rank.

    Raises:
        RequestError: there is one device.
    """
    if team.size < 2:
        raise RequestError("there is 1 device, and so no link to measure: use at least two ranks, as in --ranks 2")

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
