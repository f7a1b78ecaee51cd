"""Time of planning from the command line, in a separate process, and quality of the plans.

The four rows are those of the published table of Pfeife's planner on GPT-2 large, with its efficiencies for comparison:
any two devices joined at 100 GB/s and 10 µs, 85 % of the memory usable. Requirement: each is planned within ten seconds
on one core, with a step at least 3 % shorter than Pfeife's, and 8 % with 8 devices and 8 or 16 microbatches. Further
rows: a U-net with long skips, and the first plan after an installation, while numba compiles. Run on one core:

    taskset -c 0 python benchmarks/planning/bench_planner.py --graph gpt2_large.opgraph.json [--record FILE]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode, graph_json

from benchmarks.driver import argument_parser, report
from benchmarks.plan_command import on_devices, plan_command

ROWS = {
    "4 × 8, 68 GB": (4, 8, 80e9, 0.901),
    "8 × 8, 20.4 GB": (8, 8, 24e9, 0.741),
    "8 × 16, 34 GB": (8, 16, 40e9, 0.829),
    "8 × 32, 34 GB": (8, 32, 40e9, 0.888),
}
"""Devices, microbatches, memory (85 % of it usable), and Pfeife's efficiency."""
LEVELS, BLOCKS = 5, 6
"""Of the U-net, and of each of its levels on either side."""


def unet() -> OpGraph:
    """Operators whose tensors halve and whose parameters quadruple from level to level, and back; levels are joined."""
    nodes: list[OpNode] = []
    edges: list[OpEdge] = []

    def add(name: str, time_s: float, level: int, *sources: str) -> str:
        size, parameters = 400_000_000 >> level, 2_000_000 << 2 * min(level, LEVELS - 1)
        nodes.append(
            OpNode(name, time_s, 1.1 * time_s, 0.8 * time_s, 1e-12 * parameters, parameters, 4 * parameters, size, size)
        )
        edges.extend(OpEdge(source, name, size) for source in sources)
        return name

    ends, last = [], add("in", 1e-3, 0)
    for level in range(LEVELS):
        for block in range(BLOCKS):
            last = add(f"down{level}.{block}", (1 + block % 3) * 1e-3, level, last)
        ends.append(last)
    for level in reversed(range(LEVELS)):
        last = add(f"up{level}.join", 1e-3, level, last, ends[level])
        for block in range(BLOCKS):
            last = add(f"up{level}.{block}", (1 + block % 3) * 1e-3, level, last)
    return OpGraph(tuple(nodes), tuple(edges), name="u-net")


def planned(folder: Path, *arguments: str, cache: str | None = None) -> tuple[dict[str, object], float, float]:
    """The answer of ``panpipe plan``, the seconds it took by the clock, and those of a core."""
    environment = os.environ | ({} if cache is None else {"NUMBA_CACHE_DIR": cache})
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    text = subprocess.run(
        plan_command(*arguments),
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        encoding="utf-8",
    ).stdout
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(text), wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def row(
    folder: Path, graph: Path, devices: int, microbatches: int, memory: float, cache: str | None = None
) -> list[str]:
    """Clock, core, schedule, evaluations and efficiency of one plan."""
    arguments = on_devices(folder, graph, devices, microbatches, 0.85 * memory)
    answer, wall_s, core_s = planned(folder, *arguments, cache=cache)
    return [
        f"{wall_s:.1f}", f"{core_s:.1f}", str(answer["schedule"]), str(answer["evaluations"]),
        f"{float(str(answer['efficiency'])):.3f}",
    ]  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--graph", type=Path, required=True, help="operator-graph file of GPT-2 large")
    arguments = parser.parse_args()
    header = ("devices × microbatches, memory", "s", "core s", "schedule", "evaluations", "efficiency", "Pfeife",
              "step shorter by")  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = arguments.graph.resolve()
        row(folder, graph, 2, 2, 200e9)  # compiles what is not compiled yet
        for title, (devices, microbatches, memory, reference) in ROWS.items():
            cells = row(folder, graph, devices, microbatches, memory)
            rows.append([title, *cells, f"{reference:.3f}", f"{1 - reference / float(cells[-1]):.1%}"])
        net = folder / "unet.json"
        net.write_text(graph_json(unet()), encoding="utf-8")
        rows.append(["u-net, 8 × 16, 20.4 GB", *row(folder, net, 8, 16, 24e9), "", ""])
        with tempfile.TemporaryDirectory() as cache:
            cells = row(folder, graph, 8, 8, 24e9, cache=cache)
        rows.append(["8 × 8, 20.4 GB, nothing compiled yet", *cells, "", ""])
    report(arguments.record, "panpipe plan from the command line, on one core", header, rows)


if __name__ == "__main__":
    main()
