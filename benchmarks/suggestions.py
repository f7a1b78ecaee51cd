"""Whether what an infeasible request is told to ask for instead fits when it is asked for.

A dozen requests for GPT-2 large that no device has the memory for; each change that the answer names is asked for in a
process of its own, as a person would: more devices, smaller microbatches (the graph's costs divided), more memory,
``--recompute auto``. Offload cannot be asked for. Run, some ten minutes on one core:

    python benchmarks/suggestions.py --graph gpt2_large.opgraph.json [--cases N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panpipe.cli.output import print_table
from panpipe.core.cluster import cluster_json, fully_connected
from panpipe.core.graph import graph_json, read_graph
from panpipe.core.planner.altered import smaller

CASES = (
    (2, 16, 10e9), (8, 8, 3e9), (3, 8, 6.8e9), (4, 8, 6.8e9), (2, 4, 12e9), (8, 16, 3.2e9),
    (4, 16, 5e9), (6, 12, 4.2e9), (2, 8, 13e9), (16, 16, 1.6e9), (5, 8, 4.8e9), (8, 8, 2.5e9),
)  # fmt: skip
"""Devices, microbatches, bytes of each device."""


def asked(
    folder: Path, graph: Path, devices: int, microbatches: int, memory: float, *more: str
) -> tuple[int, dict[str, Any]]:
    """Exit status and answer of ``panpipe plan``."""
    cluster = folder / "cluster.json"
    cluster.write_text(cluster_json(fully_connected(devices, int(memory), 100e9, 10e-6)))
    command = [str(Path(sys.executable).with_name("panpipe")), "plan", "--graph", str(graph), "--cluster", str(cluster)]
    command += ["--microbatches", str(microbatches), "--json", *more]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout)


def changed(
    folder: Path, graph: Path, devices: int, microbatches: int, memory: float, change: Mapping[str, Any]
) -> tuple[str, int] | None:
    """What the change is, and the exit status of a request with it; None where it cannot be asked for."""
    what = change["change"]
    if what == "more devices":
        return f"{change['devices']} devices", asked(folder, graph, change["devices"], microbatches, memory)[0]
    if what == "more memory":
        more = change["bytes"]
        return f"{more / 1e9:.2f} GB more", asked(folder, graph, devices, microbatches, memory + more)[0]
    if what == "recompute":
        return "recompute", asked(folder, graph, devices, microbatches, memory, "--recompute", "auto")[0]
    if what == "smaller microbatches":
        parts = change["microbatches"] // microbatches
        other = folder / "smaller.json"
        other.write_text(graph_json(smaller(read_graph(graph), parts)))
        return f"1/{parts} microbatches", asked(folder, other, devices, change["microbatches"], memory)[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", type=Path, required=True, help="operator-graph file of GPT-2 large")
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many of them")
    arguments = parser.parse_args()
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as name:
        for devices, microbatches, memory in CASES[: arguments.cases]:
            case = Path(name), arguments.graph.resolve(), devices, microbatches, memory
            status, answer = asked(*case)
            title = f"{devices} × {microbatches}, {memory / 1e9:g} GB"
            for change in answer["changes"] if status == 3 else ():
                tried = changed(*case, change)
                if tried is not None:
                    rows.append((title, tried[0], "fits" if tried[1] == 0 else f"exit {tried[1]}"))
                    failed += tried[1] != 0
            if status != 3:
                rows.append((title, "", "fits as it is"))
    print_table("Suggestions", ("devices × microbatches", "asked for instead", "answer"), rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
