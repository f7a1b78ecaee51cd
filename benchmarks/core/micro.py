"""The time of panpipe's own work before anything trains.

    python benchmarks/core/micro.py [--only simulate] [--rounds 5] [--record FILE]

A schedule of 32 devices and 128 microbatches is to be built in under a second, and lowered and validated in under two;
1F1B of 16 devices and 64 microbatches is to be evaluated at 300,000 actions a second, and at 1,000,000 by the compiled
evaluator of searches; ``panpipe --help`` and ``panpipe schedule`` are to answer in under 0.7 s. Times are of the
process itself, and of the clock for commands.

The simulator is measured, memory included, from the plan to step time and peaks, for 1F1B of 64 microbatches:

- *own links*: a chain of 16 devices with a separate link between every two;
- *one switch*: the same, with one switch port for each device, which all its transfers share;
- *two nodes*: 8 devices per node with a switch port each, a PCIe switch for every two, and one NIC per node. In
  addition to the chain, stage i sends to stage 15 − i as in a U-Net, over NICs that are full most of the time;
- *replicas*: a chain of 8 devices and two replicas of it on the same two nodes, each replica on both nodes, whose
  gradients are reduced over the same NICs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import Plan, Stage
from panpipe.core.schedules.construction.initial_keys import patterns
from panpipe.core.schedules.construction.list_scheduler import instance
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.problem.setting import one_setting
from panpipe.core.timing.orders import evaluate
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

DEVICES, MICROBATCHES = 16, 64
ACTIONS = DEVICES * MICROBATCHES * 2
Work = Callable[[], object]


def plan_of(schedule: Schedule, microbatches: int, edges: list[StageEdge], mesh: Mesh) -> Plan:
    """A plan with these messages between stages."""
    return Plan(
        model="bench", graph_hash="", mesh=mesh, microbatches=microbatches, schedule=schedule.name,
        stages=tuple(Stage(index, device, (f"n{index}",)) for index, device in enumerate(schedule.placement)),
        edges=tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst))), device_actions=schedule.device_actions,
    )  # fmt: skip


def chain(stages: int, size: int) -> list[StageEdge]:
    """Messages from each stage to the next one."""
    return [StageEdge(index, index + 1, size, size) for index in range(stages - 1)]


def skips(stages: int, size: int) -> list[StageEdge]:
    """Messages as of a U-Net, without the innermost, which is an edge of the chain."""
    return [StageEdge(index, stages - 1 - index, size, size) for index in range(stages // 2 - 1)]


def large_schedule(family: str, what: str) -> Work:
    """Build, lower or validate a schedule."""
    found = find_family(family)
    problem = ScheduleProblem(32, 128, (found.chunks or (2,))[0])
    if what == "build":
        return lambda: found.build(problem)
    schedule = found.build(problem)
    plan = plan_of(schedule, 128, chain(len(schedule.placement), 1), Mesh(32))
    return partial(lower if what == "lower" else validate, plan)


def reference_evaluation() -> Work:
    schedule = find_family("1f1b").build(ScheduleProblem(DEVICES, MICROBATCHES))
    costs = [StageCosts(1.0, 1.0, 1.0)] * DEVICES
    return lambda: evaluate(schedule.device_actions, schedule.placement, costs, hop_s=0.1)


def compiled_evaluation_with_memory() -> Work:
    names = [f"n{i}" for i in range(DEVICES)]
    graph = OpGraph(tuple(OpNode(n, 1.0, 1.0, 1.0) for n in names), tuple(OpEdge(a, b, 8) for a, b in pairwise(names)))
    cluster = fully_connected(DEVICES, 10**6, 1e9, 0.1)
    setting = one_setting(graph, cluster, MICROBATCHES, (1e6,) * DEVICES, None)
    schedule = find_family("1f1b").build(ScheduleProblem(DEVICES, MICROBATCHES))
    walk = start_walk(setting, schedule, tuple(range(DEVICES + 1)), split=False)
    walk.evaluate()  # loads what is compiled, or compiles it
    return walk.evaluate


def list_scheduler() -> Work:
    task = instance(ScheduleProblem(DEVICES, MICROBATCHES), tuple(range(DEVICES)))
    whole = next(patterns(task))._replace(fused=np.ones(DEVICES, dtype=np.bool_))
    task.listed(whole)
    return lambda: task.listed(whole)


def paths_between_nodes_and_to_hosts() -> Work:
    def paths() -> None:
        cluster = find_cluster("64x8xH100")
        for device in range(len(cluster.devices)):
            cluster.path(device, (device + 8) % len(cluster.devices))
            cluster.host_path(device)

    return paths


def command(words: str) -> Work:
    given = [str(Path(sys.executable).with_name("panpipe")), *words.split()]
    return lambda: subprocess.run(given, check=True, capture_output=True)


def switched(count: int = DEVICES) -> Cluster:
    """All devices on one switch."""
    devices = tuple(Device(f"device{index}", 10**12) for index in range(count))
    return Cluster(devices, ("switch",), tuple(Link(device.name, "switch", 100e9, 5e-6) for device in devices))


def two_nodes() -> Cluster:
    """Two nodes with PCIe switches and a NIC each."""
    numbers = range(DEVICES)
    links = [Link(f"device{i}", f"switch{i // 8}", 100e9, 5e-6) for i in numbers]
    links += [Link(f"device{i}", f"pcie{i // 2}", 24e9, 2e-6) for i in numbers]
    links += [Link(f"pcie{i}", f"nic{i // 4}", 24e9, 2e-6) for i in range(DEVICES // 2)]
    links += [Link(f"nic{i}", "network", 24e9, 2e-6) for i in range(2)]
    hubs = [*(Hub(f"switch{i}") for i in range(2)), *(Hub(f"pcie{i}", "pcie") for i in range(DEVICES // 2))]
    hubs += [*(Hub(f"nic{i}", "nic") for i in range(2)), Hub("network")]
    return Cluster(tuple(Device(f"device{i}", 10**12) for i in numbers), tuple(hubs), tuple(links))


CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "own links": lambda: fully_connected(DEVICES, 10**12, 100e9, 10e-6), "one switch": switched,
    "two nodes": two_nodes, "replicas": two_nodes,
}  # fmt: skip


def simulation(cluster: str) -> Work:
    mesh = Mesh(8, 2, ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))) if cluster == "replicas" else None
    mesh = mesh or Mesh(DEVICES)
    size = 10**6 if cluster in ("own links", "one switch") else 20 * 10**6
    edges = chain(mesh.pipeline, size) + (skips(DEVICES, size // 2) if cluster == "two nodes" else [])
    schedule = find_family("1f1b").build(ScheduleProblem(mesh.pipeline, MICROBATCHES))
    plan, hardware = plan_of(schedule, MICROBATCHES, edges, mesh), CLUSTERS[cluster]()
    cost = StageCosts(1e-3, 1e-3, 1e-3, saved_bytes=10**7, parameter_bytes=10**8, gradient_bytes=10**8)

    def run() -> object:
        result = simulate(plan, (cost,) * len(plan.stages), hardware)
        return result.step_s, result.busy_s, result.peak_memory_bytes, result.peak_saved_bytes

    return run


OF_ACTIONS: dict[str, Callable[[], Work]] = {
    "evaluate": reference_evaluation, "evaluate compiled, with memory": compiled_evaluation_with_memory,
    "list scheduler": list_scheduler, **{f"simulate {name}": partial(simulation, name) for name in CLUSTERS},
}  # fmt: skip
"""What is measured for each of the compute actions of 1F1B."""
COMMANDS = {
    f"panpipe {words}": partial(command, words) for words in ("--help", "schedule 1f1b --devices 8 --microbatches 32")
}
BENCHMARKS: dict[str, Callable[[], Work]] = {
    **{
        f"{what} {family}": partial(large_schedule, family, what)
        for family in families() if family != "building-block" for what in ("build", "lower", "validate")
    },
    **OF_ACTIONS, "paths between nodes and to hosts": paths_between_nodes_and_to_hosts, **COMMANDS,
}  # fmt: skip


def main() -> None:
    # `against_commit.py` runs this file with another commit's package, which may have another driver.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", metavar="FILE", help="append the table to this Markdown file")
    given = parser.parse_args()
    rows = []
    for name in (each for each in BENCHMARKS if each.startswith(given.only)):
        work, clock, times = BENCHMARKS[name](), time.perf_counter if name in COMMANDS else time.process_time, []
        for _ in range(given.rounds):
            start = clock()
            work()
            times.append(clock() - start)
        median_s, least_s = statistics.median(times), min(times)
        rate = f"{ACTIONS / median_s:,.0f}" if name in OF_ACTIONS else "–"
        rows.append((name, f"{median_s:.4g}", f"{least_s:.4g}", rate))
        print(json.dumps({"name": name, "median_s": median_s, "action_s": least_s / ACTIONS}), flush=True)
    if given.record:
        from panpipe.benchmarks.driver import report

        report(given.record, "Time of panpipe's own work", ("what", "s, median", "least", "actions a second"), rows)


if __name__ == "__main__":
    main()
