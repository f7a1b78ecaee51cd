"""Large plans: processor time and memory of ``panpipe simulate`` and ``panpipe plan``, each in a process of its own.

    python benchmarks/planning/scale.py [--runs N] [--only NAME] [--record FILE]

- *simulate*: equal stages in 1F1B, on a switch with a port each: 64 devices with 4,096 microbatches, 256 with 1,024,
  and 16 devices × 8 replicas, whose gradients are summed on links of their own.
- *plan*: 1,000 operators in a chain, equal ones and random ones with skip edges, on 512 devices on a switch, with 1,024
  microbatches and the default budget; and bundled models, with the default budget.

The table has the goal of each, in processor seconds. All cases once take less than 8 minutes on a quiet machine.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import evolve
from panpipe.benchmarks.core.micro import chain, plan_of, switched
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.core.cluster.cluster import cluster_json, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode, graph_json
from panpipe.core.plan.plan import Plan, Prediction
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family

OPERATORS, DEVICES, MICROBATCHES = 1000, 512, 1024
MODELS = {
    "plan llama-7b, 8 A100-40GB": (10, "llama-7b", "8xA100-40GB", "32"),
    "plan llama-70b, 64 H100": (20, "llama-70b", "8x8xH100", "256"),
    "plan gpt3-175b, TP 8, 64 A100": (20, "gpt3-175b", "8x8xA100-80GB", "128", "--tp", "8"),
    "plan llama-3-405b, TP 8, 2,048 H100": (60, "llama-3-405b", "256x8xH100", "1024", "--tp", "8"),
    "plan llama-70b, 8 A100-40GB, nothing fits": (15, "llama-70b", "8xA100-40GB", "64"),
}
"""Goal, model, cluster, microbatches and further options."""


def uniform_plan(devices: int, microbatches: int, data: int = 1) -> Plan:
    """Equal stages in 1F1B."""
    schedule = find_family("1f1b").build(ScheduleProblem(devices, microbatches))
    cost = StageCosts(1e-3, 1e-3, 1e-3, saved_bytes=10**7, parameter_bytes=10**8, gradient_bytes=10**8)
    cluster = switched(devices) if data == 1 else fully_connected(devices * data, 10**12, 100e9, 5e-6)
    nothing = (0.0,) * devices
    plan = plan_of(schedule, microbatches, chain(devices, 10**6), Mesh(devices, data))
    return evolve(plan, prediction=Prediction((cost,) * devices, cluster, 1.0, nothing, nothing, 0.0))


def graph(uneven: bool) -> OpGraph:
    """A chain of operators, all equal or random with skip edges."""
    draw = random.Random(3)
    nodes, edges = [], []
    for index in range(OPERATORS):
        seconds = draw.uniform(0.2e-3, 3e-3) if uneven else 1e-3
        nodes.append(OpNode(f"operator{index}", seconds, seconds, seconds, 1e-4, 10**6, 4 * 10**6, 10**6))
        if index:
            edges.append(OpEdge(f"operator{index - 1}", f"operator{index}", 10**6))
        if uneven and index > 3 and draw.random() < 0.1:
            edges.append(OpEdge(f"operator{draw.randrange(index - 1)}", f"operator{index}", 10**5))
    return OpGraph(tuple(nodes), tuple(edges), name="random" if uneven else "equal")


def cases(folder: Path) -> dict[str, tuple[float, list[str]]]:
    """Goals in processor seconds and commands, by name; writes their files."""
    command = str(Path(sys.executable).with_name("panpipe"))
    simulate, plan = [command, "simulate", "--json"], [command, "plan", "--json"]
    found: dict[str, tuple[float, list[str]]] = {}
    for name, goal, given in (
        ("simulate 64 × 4,096", 30, uniform_plan(64, 4096)),
        ("simulate 256 × 1,024", 15, uniform_plan(256, 1024)),
        ("simulate 16 × 64, 8 replicas", 2, uniform_plan(16, 64, data=8)),
    ):
        path = folder / f"{len(found)}.json"
        given.save(path)
        found[name] = goal, [*simulate, str(path)]
    (folder / "cluster.json").write_text(cluster_json(switched(DEVICES)), encoding="utf-8")
    for uneven in (False, True):
        path = folder / f"{len(found)}.json"
        path.write_text(graph_json(graph(uneven)), encoding="utf-8")
        request = ["--graph", str(path), "--cluster", str(folder / "cluster.json"), "--microbatches", str(MICROBATCHES)]
        found[f"plan 1,000 {'random' if uneven else 'equal'} operators, {DEVICES} devices"] = 60, [*plan, *request]
    for name, (goal, model, cluster, microbatches, *options) in MODELS.items():
        request = ["--model", model, "--cluster", cluster, "--microbatches", microbatches, *options]
        found[name] = goal, [*plan, *request]
    return found


def run(command: list[str], *, fits: bool) -> tuple[float, int]:
    """Processor seconds of a command in a process of its own, and the most memory in bytes.

    Raises:
        SystemExit: it has failed, or has found a plan where none fits.
    """
    code = (
        "import json, resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss, done.returncode]))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PANPIPE_CACHE": ""}
    text = subprocess.run(
        [sys.executable, "-c", code, *command], check=True, capture_output=True, text=True, env=environment
    ).stdout
    seconds, most, status = json.loads(text)
    if (status == 0) is not fits:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return seconds, most


def main() -> None:
    """Run every case several times, and print a table."""
    arguments = argument_parser(__doc__, runs=1, only=("", "cases whose name contains this")).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for title, (goal, command) in cases(Path(name)).items():
            if arguments.only in title:
                runs = [run(command, fits="nothing fits" not in title) for _ in range(arguments.runs)]
                seconds = [each for each, _ in runs]
                rows.append([
                    title, f"{goal:g}", str(len(runs)), f"{statistics.median(seconds):.1f}",
                    f"{min(seconds):.1f} to {max(seconds):.1f}", f"{max(most for _, most in runs) / 1e9:.2f}",
                ])  # fmt: skip
                print(rows[-1], flush=True)
    header = ("command", "goal", "runs", "processor s, median", "from – to", "most memory, GB")
    report(arguments.record, "Large plans, each command in a process of its own", header, rows)


if __name__ == "__main__":
    main()
