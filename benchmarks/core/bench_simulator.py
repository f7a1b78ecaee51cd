"""Compute actions per second of the simulator, memory included: from the plan to step time and peaks.

    python benchmarks/core/bench_simulator.py [--repeats N]

1F1B, 16 devices, 64 microbatches, 2048 compute actions:

- *own links*: a chain, 3840 sends and receives, and a separate link between every two devices;
- *one switch*: the same, with one switch port for each device, which all its transfers share;
- *two nodes*: 8 devices per node with a switch port each, a PCIe switch for every two, and one NIC per node. In
  addition to the chain, stage i sends to stage 15 − i as in a U-Net: 5632 sends and receives. Those between nodes share
  the NICs and PCIe switches, which are full most of the time;
- *replicas*: a chain of 8 devices and two replicas of it on the same two nodes, each replica on both nodes, whose
  gradients are reduced over the same NICs.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.plan.plan import Plan, Stage
from panpipe.core.schedules.one_f_one_b import one_f_one_b
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.simulators.run import simulate

from benchmarks.recording import machine, record

DEVICES, MICROBATCHES = 16, 64


def build_plan(mesh: Mesh, edges: list[StageEdge]) -> Plan:
    schedule = one_f_one_b(ScheduleProblem(mesh.pipeline, MICROBATCHES))
    return Plan(
        model="bench",
        graph_hash="",
        mesh=mesh,
        microbatches=MICROBATCHES,
        schedule=schedule.name,
        stages=tuple(Stage(index, index, (f"stage{index}",)) for index in range(mesh.pipeline)),
        edges=tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst))),
        device_actions=schedule.device_actions,
    )


def chain(stages: int, size: int) -> list[StageEdge]:
    return [StageEdge(index, index + 1, size, size) for index in range(stages - 1)]


def skips(stages: int, size: int) -> list[StageEdge]:
    """As of a U-Net, without the innermost, which is an edge of the chain."""
    return [StageEdge(index, stages - 1 - index, size, size) for index in range(stages // 2 - 1)]


def switched() -> Cluster:
    devices = tuple(Device(f"device{index}", 10**12) for index in range(DEVICES))
    return Cluster(devices, ("switch",), tuple(Link(device.name, "switch", 100e9, 5e-6) for device in devices))


def two_nodes() -> Cluster:
    numbers = range(DEVICES)
    links = [Link(f"device{i}", f"switch{i // 8}", 100e9, 5e-6) for i in numbers]
    links += [Link(f"device{i}", f"pcie{i // 2}", 24e9, 2e-6) for i in numbers]
    links += [Link(f"pcie{i}", f"nic{i // 4}", 24e9, 2e-6) for i in range(DEVICES // 2)]
    links += [Link(f"nic{i}", "network", 24e9, 2e-6) for i in range(2)]
    hubs = [*(Hub(f"switch{i}") for i in range(2)), *(Hub(f"pcie{i}", "pcie") for i in range(DEVICES // 2))]
    hubs += [*(Hub(f"nic{i}", "nic") for i in range(2)), Hub("network")]
    return Cluster(tuple(Device(f"device{i}", 10**12) for i in numbers), tuple(hubs), tuple(links))


@dataclass
class Rates:
    """Compute actions per second: median and best by wall time, and best by CPU time, which is independent of other
    processes on the machine."""

    median: float
    best: float
    on_core: float
    shared: str


def rates(plan: Plan, cluster: Cluster, repeats: int) -> Rates:
    """Run it ``repeats`` times; also reports how much is shared."""
    cost = StageCosts(1e-3, 1e-3, 1e-3, saved_bytes=10**7, parameter_bytes=10**8, gradient_bytes=10**8)
    costs = (cost,) * len(plan.stages)
    actions = sum(len(order) for order in plan.device_actions) * plan.mesh.data
    seconds, on_core = [], []
    for _ in range(repeats):
        start, start_on_core = time.perf_counter(), time.process_time()
        result = simulate(plan, costs, cluster)
        _ = result.step_s, result.busy_s, result.peak_memory_bytes, result.peak_saved_bytes
        seconds.append(time.perf_counter() - start)
        on_core.append(time.process_time() - start_on_core)
    slowed = sum(any(piece.held_by for piece in flow.all_pieces) for flow in result.flows) / len(result.flows)
    fullest = max(use.utilisation for use in result.links)
    shared = f"{slowed:.0%} of the transfers slowed, fullest link {fullest:.0%}"
    return Rates(actions / statistics.median(seconds), actions / min(seconds), actions / min(on_core), shared)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--record", default="benchmarks/results/simulator.md")
    arguments = parser.parse_args()
    line = build_plan(Mesh(DEVICES), chain(DEVICES, 10**6))
    cases = {
        "own links": (line, fully_connected(DEVICES, 10**12, 100e9, 10e-6)),
        "one switch": (line, switched()),
        "two nodes": (
            build_plan(Mesh(DEVICES), chain(DEVICES, 20 * 10**6) + skips(DEVICES, 10 * 10**6)),
            two_nodes(),
        ),
        "replicas": (
            build_plan(Mesh(8, 2, ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))), chain(8, 20 * 10**6)),
            two_nodes(),
        ),
    }
    rows = []
    for name, (plan, cluster) in cases.items():
        found = rates(plan, cluster, arguments.repeats)
        numbers = [f"{number:,.0f}" for number in (found.median, found.best, found.on_core)]
        rows.append([name, *numbers, found.shared])
        print(f"{name}: {numbers[0]} compute actions/s (best {numbers[1]}, on the core {numbers[2]}); {found.shared}")
    header = ("cluster", "compute actions/s, median", "best", "best by time on the core", "sharing")
    title = f"1F1B, {DEVICES} devices, {MICROBATCHES} microbatches"
    where = f"{machine()}, load {os.getloadavg()[0]:.1f}"
    record(arguments.record, title, where, header, rows)


if __name__ == "__main__":
    main()
