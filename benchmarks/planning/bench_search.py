"""The search for schedules compared with the best public schedulers at the same memory.

For every case and memory level of ``tests/data/frontiers.json``: makespan and idle time (makespan minus the busiest
device's work) of what is found, the public best, the lower bound, and processor time. The last line is the worst
ratio of makespans, and the median share of idle time saved over the cases with hop time or unequal costs at or below
half of 1F1B's memory. The status is 1 if a schedule is slower than the public best.

    python benchmarks/planning/bench_search.py [--evaluations 800000] [--seed 0] [--devices 8] [--record FILE]
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from panpipe.benchmarks.driver import argument_parser, report
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.search.find_schedule import EVALUATIONS, find_schedule

CASES = Path(__file__).resolve().parents[2] / "tests" / "data" / "frontiers.json"
CHUNKS = (1, 2, 3, 4)


def problems_of(case: dict[str, Any], memory: float) -> list[ScheduleProblem]:
    """A case for each number of chunks; memory in one device's saved tensors for one microbatch."""
    problems = []
    for chunks in CHUNKS:
        cost = StageCosts(
            case["forward"] / chunks, case["backward_input"] / chunks, case["backward_weight"] / chunks, saved_bytes=1
        )
        stages = (cost,) * (case["devices"] * chunks)
        # Levels in the file are rounded to four digits.
        limit = (memory + 1e-4) * chunks
        problems.append(
            ScheduleProblem(case["devices"], case["microbatches"], chunks, stages, case["comm"], memory_limit=limit)
        )
    return problems


def main() -> int:
    arguments = argument_parser(
        __doc__, evaluations=EVALUATIONS, seed=0, devices=(0, "only the cases with this number of devices")
    ).parse_args()
    rows, worst, saved = [], 0.0, []
    for case in json.loads(CASES.read_text(encoding="utf-8"))["frontiers"]:
        if arguments.devices not in (0, case["devices"]):
            continue
        costs = case["forward"], case["backward_input"], case["backward_weight"]
        work = case["microbatches"] * sum(costs)
        for public in case["frontier"]:
            start = time.process_time()
            found = find_schedule(
                problems_of(case, public["memory"]), families().values(), evaluations=arguments.evaluations,
                seed=arguments.seed,
            )  # fmt: skip
            seconds = time.process_time() - start
            span = found.result.makespan
            worst = max(worst, span / public["makespan"])
            cut = 1 - (span - work) / (public["makespan"] - work)
            counts = (case["comm"] > 0 or len(set(costs)) > 1) and public["memory"] <= case["devices"] / 2
            saved += [cut] if counts else []
            label = f"p={case['devices']} m={case['microbatches']} {costs} hop {case['comm']}"
            rows.append((label, f"{public['memory']:g}", f"{public['schedule']} {public['makespan']:g}", f"{span:g}",
                         f"{cut:+.1%}" + ("" if counts else " (not counted)"), f"{found.bound:g}",
                         f"{found.problem.chunks}", f"{seconds:.1f}"))  # fmt: skip
            print(" | ".join(rows[-1]), flush=True)
    summary = f"worst ratio of makespans {worst:.4f}; idle time cut by {statistics.median(saved):.1%} in the median"
    title = f"Search with {arguments.evaluations} evaluations, seed {arguments.seed}: {summary}"
    header = ("case", "memory", "public best", "found", "idle time cut", "bound", "chunks", "s")
    report(arguments.record, title, header, rows)
    return int(worst > 1 + 1e-9)


if __name__ == "__main__":
    sys.exit(main())
