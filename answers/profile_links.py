"""``panpipe profile links``: the measured time of messages between ranks, alone and together, as a cluster."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ..backends.registry import find_backend
from ..core.cluster.cluster import Cluster, Device, cluster_json
from ..core.cluster.links.lines import LineFit, fit_line
from ..core.cluster.links.shared import SharedLinks, groups_to_measure, shared_links
from ..core.cluster.routing import path_rate
from ..core.documents import as_plain
from ..core.errors import RequestError
from ..core.files.write import write_text
from ..runtimes.devices.available_memory import machine
from ..runtimes.devices.devices import device_of_rank
from ..runtimes.devices.host_copies import MeasuredCopy, host_copies
from ..runtimes.launch.launch import make_team
from ..runtimes.profile.measured_cluster import memory_of_each
from .link_measurements import measure_links
from .output import bytes_text, note, print_json, print_table, rate_text, seconds_text


@frozen
class LinkProfile:
    """The measured links, and the cluster that is fitted to them.

    Args:
        cluster: the devices and their links.
        alone: (sender, receiver) → latency and rate of the pair, fitted to messages without other traffic.
        tree: the shared links, with the measurements of several pairs at the same time.
        copies: measured copies between the first device and its host.
        what: the machine and transport, in one line.
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
        where: the type of device that the messages' tensors are on.
        kind: the type of the devices in the file, from the catalogue.
        ranks: how many to start; None under torchrun.
        backend: the transport; that of training by default.
        repeats: how often each message is sent.
        out: the cluster file to write.
        json: whether to print JSON.

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
        memory = memory_of_each(team, here)
        (copies, *_) = team.everywhere(lambda device: host_copies(here) if device == 0 else [])
    finally:
        team.close()
    alone = {pair: fit_line(list(times), list(times.values())) for pair, times in measured.alone.items()}
    names = [f"device{number}" for number in range(team.size)]
    latencies = [[alone[a, b].latency_s if a != b else 0.0 for b in range(team.size)] for a in range(team.size)]
    tree = shared_links(names, measured.together, {pair: fit.bytes_per_s for pair, fit in alone.items()}, latencies)
    cluster = Cluster(tuple(Device(name, memory, kind) for name in names), tree.hubs, tree.links)
    what = f"{machine(where)}, {len(set(hosts))} hosts, {team.kind.name}, {datetime.date.today().isoformat()}"
    return LinkProfile(cluster, alone, tree, copies, what)


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
    cuts = [
        (
            ", ".join(map(str, sorted(cut.group))),
            rate_text(cut.sent_bytes_per_s),
            rate_text(cut.received_bytes_per_s),
            rate_text(cut.fitted_bytes_per_s),
            f"{cut.error:.0%}",
        )
        for cut in found.tree.cuts
    ]
    print_table(
        "Together: a group to all others at once, and back", ("group", "sent", "received", "fitted", "error"), cuts
    )
    for link in found.cluster.links:
        group = next((found.tree.shared[end] for end in (link.a, link.b) if end in found.tree.shared), None)
        shared = f", shared by {', '.join(map(str, sorted(group)))}" if group else ""
        print(f"{link.a} – {link.b}: {rate_text(link.bytes_per_s)}, {seconds_text(link.latency_s)}{shared}")
    for copy in found.copies:
        way = f"{'to' if copy.to_host else 'from'} {'pinned' if copy.pinned else 'pageable'} host memory"
        print(f"{way}: {rate_text(copy.line.bytes_per_s)}, {seconds_text(copy.line.latency_s)}")
