"""The time of panpipe's own work before anything trains: commands, schedules built, lowered, validated and evaluated.

A schedule of 32 devices and 128 microbatches is to be built in under a second, and lowered and validated in under two;
1F1B of 16 devices and 64 microbatches is to be evaluated at 300,000 actions a second, and at 1,000,000 by the compiled
twin that searches use; `panpipe --help` and `panpipe schedule` are to answer in under 0.7 s. Seconds are of the
process's own time, and of the clock for commands; the best of some repetitions.

    python benchmarks/core/bench_core.py [--record FILE]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from panpipe.answers.output import print_table
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.evaluate.coding import Integers
from panpipe.core.evaluate.reference import Evaluator
from panpipe.core.plan.lowering import lower
from panpipe.core.plan.plan import Plan, Stage
from panpipe.core.plan.validation.validate import validate
from panpipe.core.schedules.construction.decode import Priorities, SchedulerInput, decode
from panpipe.core.schedules.construction.initial_keys import patterns
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleFamily, ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.problem.setting import one_setting

from benchmarks.recording import machine, record

DEVICES, MICROBATCHES = 32, 128
REPEATS = 3

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What some work returns, and the best of its times."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def large(family: ScheduleFamily) -> list[str]:
    """A row: the family, and seconds to build, to lower and to validate its large schedule."""
    problem = ScheduleProblem(DEVICES, MICROBATCHES, (family.chunks or (2,))[0])
    schedule, build_s = timed(lambda: family.build(problem))
    count = len(schedule.placement)
    plan = Plan(
        model="bench", graph_hash="", mesh=Mesh(DEVICES), microbatches=MICROBATCHES, schedule=schedule.name,
        stages=tuple(Stage(index, device, (f"n{index}",)) for index, device in enumerate(schedule.placement)),
        edges=tuple(StageEdge(index, index + 1, 1, 1) for index in range(count - 1)),
        device_actions=schedule.device_actions,
    )  # fmt: skip
    _, lower_s = timed(lambda: lower(plan))
    _, validate_s = timed(lambda: validate(plan))
    return [family.name, f"{build_s:.2f}", f"{lower_s:.2f}", f"{validate_s:.2f}", f"{lower_s + validate_s:.2f}"]


def others() -> list[list[str]]:
    """Rows: what was done, and how fast."""
    schedule = find_family("1f1b").build(ScheduleProblem(16, 64))
    evaluator = Evaluator(schedule.placement, [StageCosts(1.0, 1.0, 1.0)] * 16, hop_s=0.1)
    _, evaluate_s = timed(lambda: evaluator.evaluate(schedule.device_actions))
    names = [f"n{i}" for i in range(16)]
    chain = OpGraph(tuple(OpNode(n, 1.0, 1.0, 1.0) for n in names), tuple(OpEdge(a, b, 8) for a, b in pairwise(names)))
    setting = one_setting(chain, fully_connected(16, 10**6, 1e9, 0.1), 64, (1e6,) * 16, None)
    walk = start_walk(setting, schedule, tuple(range(17)), split=False)
    walk.evaluate()  # loads what is compiled, or compiles it
    start = _start(ScheduleProblem(16, 64))
    decode(*start)
    _, shortcut_s = timed(lambda: [walk.evaluate() for _ in range(1000)])
    _, decode_s = timed(lambda: [decode(*start) for _ in range(100)])
    _, paths_s = timed(lambda: _paths("64x8xH100"))
    return [
        ["1F1B, 16 × 64: actions evaluated a second", f"{16 * 64 * 2 / evaluate_s:,.0f}"],
        ["the same by the compiled twin, memory included", f"{1000 * 16 * 64 * 2 / shortcut_s:,.0f}"],
        ["the same by the list scheduler, which decides the order, too", f"{100 * 16 * 64 * 2 / decode_s:,.0f}"],
        ["64x8xH100 built, a path from each device to the next node and to its host: s", f"{paths_s:.2f}"],
    ]


def _start(problem: ScheduleProblem) -> tuple[SchedulerInput, Priorities, Integers, Integers]:
    """A start of the search over orders, and where its orders are written."""
    state = next(patterns(instance(problem, tuple(range(problem.devices)))))
    state.fused[:] = True
    orders = np.zeros((problem.devices, 3 * problem.microbatches), dtype=np.int64)
    given = state.task.scheduler_input(state.fused)
    return given, state.priorities, orders, np.zeros(problem.devices, dtype=np.int64)


def _paths(name: str) -> None:
    cluster = find_cluster(name)
    for device in range(len(cluster.devices)):
        cluster.path(device, (device + 8) % len(cluster.devices))
        cluster.host_path(device)


def commands() -> list[list[str]]:
    """Rows: a command, and how long it takes from its start to its end."""
    rows = []
    for words in (["--help"], ["schedule", "1f1b", "--devices", "8", "--microbatches", "32"]):
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            subprocess.run([Path(sys.executable).with_name("panpipe"), *words], check=True, capture_output=True)
            seconds.append(time.perf_counter() - start)
        rows.append([f"panpipe {' '.join(words)}: s", f"{min(seconds):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="append the results to this Markdown file")
    arguments = parser.parse_args()
    header = ("schedule", "build s", "lower s", "validate s", "lower and validate s")
    named = [family for family in families().values() if family.name != "building-block"]
    tables = [
        (f"{DEVICES} devices × {MICROBATCHES} microbatches", header, [large(family) for family in named]),
        ("Evaluation and commands", ("work", "result"), others() + commands()),
    ]
    for title, head, rows in tables:
        print_table(title, head, rows)
        if arguments.record:
            record(arguments.record, title, machine(), head, rows)


if __name__ == "__main__":
    main()
