"""The search for plans against the exact optimum, on graphs of up to nine operators.

Two hundred random graphs from a seed, on two or three devices with four to six microbatches; half of them with memory
that is short. For each graph `exact` looks for a plan that is faster than the search's by more than 0.5 %, and where
the search finds nothing that fits, for any plan. A graph without an answer within the effort counts as open.

    python benchmarks/planning/exhaustive.py [--cases 0,50] [--seed 0] [--most 400000] [--record FILE]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.errors import InfeasibleError
from panpipe.core.plan.plan import Plan
from panpipe.core.schedules.registry import resident_families
from panpipe.core.search.choose import plan
from panpipe.core.search.search_options import SearchOptions

from benchmarks.driver import argument_parser, report
from benchmarks.planning.exact import fastest_within
from benchmarks.planning.small_cases import CASES, Case, case_of

NEAR = 0.005
HEADER = ("case", "search", "schedule", "faster by", "answer", "search s", "exact s")


def searched(case: Case, seed: int) -> Plan | None:
    """The search's plan; None if it finds nothing that fits."""
    options = SearchOptions(families=resident_families(), seed=seed)
    try:
        return plan(case.graph, case.cluster, case.microbatches, options)
    except InfeasibleError:
        return None


def compared(case: Case, seed: int, most: int) -> tuple[list[str], str]:
    """A row of the table, and its answer: near, slower, missed or open."""
    began = time.process_time()
    found = searched(case, seed)
    middle = time.process_time()
    if found is None:
        horizon, worse = case.longest_s, "missed"
        step, schedule = "nothing fits", ""
    else:
        horizon, worse = int(found.predicted.step_s / (1 + NEAR) - 1e-6), "slower"
        step, schedule = f"{found.predicted.step_s:g}", found.schedule
    exact = fastest_within(case, horizon, most)
    answer = worse if exact.step_s is not None else "open" if exact.open else "near"
    faster = "" if exact.step_s is None or found is None else f"{found.predicted.step_s / exact.step_s - 1:.2%}"
    spent = time.process_time() - middle
    return [case.name, step, schedule, faster, answer, f"{middle - began:.1f}", f"{spent:.1f}"], answer


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", help="first and one past the last, such as 0,50")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--most", type=int, default=400_000, help="partial orders of a placement with as many actions")
    given = parser.parse_args()
    first, last = map(int, given.cases.split(",")) if given.cases else (0, CASES)
    rows, answers = [], []
    for number in range(first, last):
        row, answer = compared(case_of(number), given.seed, given.most)
        rows.append(row)
        answers.append(answer)
        print(" | ".join(row), flush=True)
    kinds = ("near", "slower", "missed", "open")
    summary = f"{len(answers)} graphs: " + ", ".join(f"{answers.count(kind)} {kind}" for kind in kinds)
    report(given.record, summary, HEADER, rows)
    return int(answers.count("near") + answers.count("open") < 0.95 * len(answers) or "missed" in answers)


if __name__ == "__main__":
    sys.exit(main())
