"""How fast saved tensors go to the host and back: measured on all devices at once, through the copies of a step.

On a CPU a copy is one of memory, on the cores that compute. So it is measured as steps copy: all of some microbatches
are copied out before the first is copied back, from storages that were just written, and into new ones; and the device
computes meanwhile.
"""

import socket
import statistics
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import evolve, frozen

from ...backends.streams import streams_of
from ...core.cluster.cluster import Cluster, Hub
from ...core.cluster.links.lines import LineFit, fit_line
from ...core.cluster.routing import Link
from ...core.plain_data import exchanged
from ..devices.compute import ComputeQueue, Stopwatch, compute_queue
from ..launch.team import Team
from ..offload.copies import Copy, Part
from ..offload.device_offload import DeviceOffload
from ..offload.offloads import usable_bytes
from ..offload.tier import OffloadTier

STORAGE, STORAGES, MICROBATCHES = 8 << 20, 4, 4
"""Bytes of a storage, storages of a copy, and microbatches that are on the host at once: 128 MB, more than a core's
caches. The C library's heap keeps freed blocks of a storage's size (`devices/heap`)."""
SMALLEST = 1 << 16
"""Bytes of a storage where the host has almost no memory."""
ROUNDS = 3
"""Measured rounds, after one that touches the arena's memory first."""
ROWS = 512
"""Rows and columns of the matrices that are multiplied meanwhile: some milliseconds on a core."""

HOST = "host"
"""Names of the hubs in a measured cluster start with it; then they have their number, and what limits their memory."""


def host_rates(tier: OffloadTier, device: torch.device, number: int, usable: int) -> tuple[float, float]:
    """Bytes per second out and back: of all copies together, because slow and fast ones add up in a step, too.

    Args:
        usable: bytes of the tier that may be used.

    Raises:
        RequestError: there is no space for the copies.
    """
    storage = max(min(STORAGE, usable // (STORAGES * MICROBATCHES)), SMALLEST)
    memory, queue = DeviceOffload(tier, device, number), compute_queue(device, number)
    memory.reserve(storage * STORAGES * MICROBATCHES)
    out_s, back_s = 0.0, 0.0
    try:
        queue.begin(True)
        with queue.active(), computing(device):
            _round(memory, device, storage)
            for _ in range(ROUNDS):
                outs, backs = _round(memory, device, storage)
                out_s += sum(_seconds(queue, copy) for copy in outs)
                back_s += sum(_seconds(queue, copy) for copy in backs)
        queue.end()
    finally:
        memory.close()
    size = ROUNDS * MICROBATCHES * STORAGES * storage
    return size / out_s, size / back_s


def _round(memory: DeviceOffload, device: torch.device, storage: int) -> tuple[list[Copy], list[Copy]]:
    """Copy microbatches out, and then back, the last one first."""
    outs, backs = list[Copy](), list[Copy]()
    for microbatch in range(MICROBATCHES):
        outs.append(memory.copies.out(_parts(microbatch, device, storage, written=True)))
        outs[-1].wait()
    for microbatch in reversed(range(MICROBATCHES)):
        backs.append(memory.copies.back(_parts(microbatch, device, storage, written=False), outs[microbatch]))
        backs[-1].wait()
    return outs, backs


def _parts(microbatch: int, device: torch.device, storage: int, *, written: bool) -> list[Part]:
    first, make = microbatch * STORAGES, torch.ones if written else torch.empty
    return [
        Part(make(storage, dtype=torch.uint8, device=device), (first + place) * storage) for place in range(STORAGES)
    ]


def _seconds(queue: ComputeQueue, copy: Copy) -> float:
    return max(queue.nanoseconds(copy.ended_ns) - queue.nanoseconds(copy.started_ns), 1) / 1e9


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """A context in which a device on the CPU computes; others have engines for copies that do not compute."""
    if streams_of(device) is not None:
        yield
        return
    end, threads = threading.Event(), torch.get_num_threads()

    def compute() -> None:
        torch.set_num_threads(threads)  # of this thread: a new one would use all cores
        with torch.no_grad():
            matrix = torch.full((ROWS, ROWS), 1 / ROWS)
            while not end.is_set():
                torch.mm(matrix, matrix)

    thread = threading.Thread(target=compute, name="panpipe computes during copies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def with_hosts(cluster: Cluster, team: Team, where: Mapping[int, torch.device], tier: OffloadTier) -> Cluster:
    """A measured cluster with the hosts that saved tensors go to, each device on a link of its own.

    The rates are those of all devices at once, so that what they share is in them. All ranks call this together.

    Args:
        cluster: without hosts.
        where: device of this process → the torch device that it computes on.
    """
    here = socket.gethostname()
    # Before any device occupies a part of it.
    usable = team.everywhere(lambda _: (here, *usable_bytes(tier)))
    share = min(size for _, size, _ in usable) // len(usable)
    found = team.everywhere(lambda device: (here, *host_rates(tier, where[device], device, share)))
    names = list(dict.fromkeys(host for host, *_ in found))
    hubs = []
    for number, name in enumerate(names):
        size, limit = min((size, limit) for host, size, limit in usable if host == name)
        hubs.append(Hub(f"{HOST} {number} ({limit})", "host", size))
    # No message between devices is to take this way, as paths are chosen by latency.
    latency_s = max((link.latency_s for link in cluster.links), default=0.0)
    ranks = team.mesh.cluster_devices
    links = [
        Link(cluster.devices[rank].name, hubs[names.index(host)].name, out, latency_s, back_bytes_per_s=back)
        for rank, (host, out, back) in zip(ranks, found, strict=True)
    ]
    return evolve(cluster, hubs=(*cluster.hubs, *hubs), links=(*cluster.links, *links))


SIZES, REPEATS = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26), 10
"""Bytes of a copy, up to the saved tensors of a stage, and how often each is measured."""


@exchanged
@frozen
class MeasuredCopy:
    """One kind of copy.

    Args:
        to_host: the direction.
        pinned: whether the host's memory is page-locked.
        line: its time by size.
    """

    to_host: bool
    pinned: bool
    line: LineFit


def host_copies(device: torch.device) -> list[MeasuredCopy]:
    """Measure both directions, pinned and pageable; empty if the device is the CPU."""
    if streams_of(device) is None:
        return []
    found = []
    for to_host in (False, True):
        for pinned in (True, False):
            times = [_copy_s(device, size, to_host, pinned) for size in SIZES]
            found.append(MeasuredCopy(to_host, pinned, fit_line(SIZES, times)))
    return found


def _copy_s(device: torch.device, size: int, to_host: bool, pinned: bool) -> float:
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    target, source = (here, there) if to_host else (there, here)
    watch, times = Stopwatch(device), []
    with watch.active():
        for _ in range(REPEATS + 1):
            start = watch.now()
            target.copy_(source, non_blocking=True)
            times.append(watch.between(start, watch.now()))
    return statistics.median(times[1:])
