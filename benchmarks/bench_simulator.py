"""How many compute actions a second the simulator runs, memory included: from the plan to step time and peaks.

    python benchmarks/bench_simulator.py [--repeats N]

1F1B, 16 devices, 64 microbatches: 2048 compute actions and 3840 sends and receives. Once with a link of its own between
every two devices, and once with every device behind one port of a switch, where all its transfers share the port.
"""

import argparse
import statistics
import time

from panpipe.core.cluster import Cluster, Device, Link, fully_connected
from panpipe.core.costs import StageCosts, StageEdge
from panpipe.core.plan import Mesh, Plan, Stage
from panpipe.core.schedules.one_f_one_b import one_f_one_b
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.simulators.run import simulate
from recording import machine, record

DEVICES, MICROBATCHES = 16, 64


def build_plan() -> Plan:
    schedule = one_f_one_b(ScheduleProblem(DEVICES, MICROBATCHES))
    return Plan(
        model="bench",
        graph_hash="",
        mesh=Mesh(DEVICES),
        microbatches=MICROBATCHES,
        schedule=schedule.name,
        stages=tuple(Stage(index, index, (f"stage{index}",)) for index in range(DEVICES)),
        edges=tuple(StageEdge(index, index + 1, 1_000_000, 1_000_000) for index in range(DEVICES - 1)),
        device_actions=schedule.device_actions,
    )


def switched() -> Cluster:
    devices = tuple(Device(f"device{index}", 10**12) for index in range(DEVICES))
    return Cluster(devices, ("switch",), tuple(Link(device.name, "switch", 100e9, 5e-6) for device in devices))


def rate(plan: Plan, cluster: Cluster, repeats: int) -> tuple[float, float]:
    """Median and best compute actions per second."""
    costs = (StageCosts(1e-3, 1e-3, 1e-3, saved_bytes=10**7, parameter_bytes=10**8, workspace_bytes=10**6),) * DEVICES
    actions = sum(len(order) for order in plan.device_actions)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = simulate(plan, costs, cluster)
        _ = result.step_s, result.busy_s, result.peak_memory_bytes, result.peak_saved_bytes
        seconds.append(time.perf_counter() - start)
    return actions / statistics.median(seconds), actions / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--record", default="benchmarks/results/simulator.md")
    arguments = parser.parse_args()
    plan = build_plan()
    clusters = {"own links": fully_connected(DEVICES, 10**12, 100e9, 10e-6), "one switch": switched()}
    rows = []
    for name, cluster in clusters.items():
        median, best = rate(plan, cluster, arguments.repeats)
        rows.append([name, f"{median:,.0f}", f"{best:,.0f}"])
        print(f"{name}: {median:,.0f} compute actions/s (best {best:,.0f})")
    header = ("cluster", "compute actions/s, median", "best")
    record(arguments.record, f"1F1B, {DEVICES} devices, {MICROBATCHES} microbatches", machine(), header, rows)


if __name__ == "__main__":
    main()
