"""``panpipe plan`` from the command line, for devices of which any two are joined at 100 GB/s and 10 µs."""

import sys
from pathlib import Path

from panpipe.core.cluster.cluster import cluster_json, fully_connected


def plan_command(*arguments: str) -> list[str]:
    """The command, which answers in JSON."""
    return [str(Path(sys.executable).with_name("panpipe")), "plan", *arguments, "--json"]


def on_devices(folder: Path, graph: Path, devices: int, microbatches: int, memory: float) -> list[str]:
    """Its arguments for a graph on this many devices with ``memory`` bytes each; writes their cluster file."""
    cluster = folder / "cluster.json"
    cluster.write_text(cluster_json(fully_connected(devices, int(memory), 100e9, 10e-6)), encoding="utf-8")
    return ["--graph", str(graph), "--cluster", str(cluster), "--microbatches", str(microbatches)]
