"""Is this tree slower than another commit? Both trees run the same benchmarks in turns, on this machine, in one run.

    python benchmarks/against_commit.py COMMIT [--rounds 3] [--only simulator,search] [--small] [--record FILE]

``--tree OTHER`` compares another commit than the tree that is here, such as the end of a change of many commits.

The commit is checked out as a worktree of git in a temporary folder. Each tree runs its own benchmark scripts (of the
simulator those of this tree), and the command line for plans and schedules, with this Python: only the folder that is
imported as ``panpipe`` differs. The first run of a search is not counted, because it compiles. A figure's ratio is that
of the two runs of a round, this tree over the commit, as a time: below 1 this tree is faster. Printed are the medians
over rounds, and the smallest and largest ratio. Command lines are measured in seconds of a core, so that a search that
evaluates more counts as slower: the step that it found is printed, too. Three rounds are to take less than ten minutes
on a machine that nothing else uses.
"""

import json
import statistics
from typing import Any

from panpipe.benchmarks.core.fixed_plans import graph
from panpipe.benchmarks.driver import ROOT, Tree, argument_parser, report, trees

Figures = dict[str, float]
"""Name of a figure → its value; the less, the better."""


def objects(text: str) -> list[dict[str, Any]]:
    """The lines of an output that are JSON objects."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def two_workers(tree: Tree, small: bool) -> Figures:
    """The step of the benchmark GPT on two gloo workers, by 1F1B."""
    rounds = "1" if small else "5"
    found = objects(tree.script("two_workers", "--rounds", rounds, "--schedules", "1f1b", "--peers", ""))
    return {"step of two workers, s": next(one["step_s"] for one in found if one["runner"] == "panpipe")}


def action_overhead(tree: Tree, small: bool) -> Figures:
    """Time of a compute action of very small stages."""
    steps, rounds = ("5", "2") if small else ("20", "5")
    return {"action, µs": objects(tree.script("action_overhead", "--steps", steps, "--rounds", rounds))[0]["panpipe"]}


def simulator(tree: Tree, small: bool) -> Figures:
    """Time of a simulated compute action, for each cluster of the benchmark."""
    micro = str(ROOT / "benchmarks" / "core" / "micro.py")
    found = objects(tree.run(micro, "--only", "simulate", "--rounds", "2" if small else "8"))
    return {f"{each['name']}, µs an action": 1e6 * each["action_s"] for each in found}


def planner(tree: Tree, small: bool) -> Figures:
    """Core seconds of a plan of a graph, by 1F1B and by a search, and the predicted steps."""
    file = tree.imports / "graph.json"
    file.write_text(json.dumps(graph()), encoding="utf-8")
    found = {}
    for schedule in ("1f1b",) if small else ("1f1b", "auto"):
        answer, seconds = tree.command(
            "plan", "--graph", str(file), "--cluster", "4xA100-40GB", "--microbatches", "8", "--schedule", schedule
        )
        found[f"plan by {schedule}, core s"] = seconds
        found[f"plan by {schedule}, its step, s"] = answer["predicted_step_s"]
    return found


def search(tree: Tree, small: bool) -> Figures:
    """Core seconds of a search for a schedule, and its makespan."""
    answer, seconds = tree.command(
        "schedule", "auto", "--devices", "2" if small else "4", "--microbatches", "8", "--forward", "1",
        "--backward-input", "1.1", "--backward-weight", "0.9", "--comm", "0.05", "--memory-limit", "3",
    )  # fmt: skip
    return {"search for a schedule, core s": seconds, "search for a schedule, its makespan": answer["makespan"]}


BENCHMARKS = {each.__name__: each for each in (two_workers, action_overhead, simulator, planner, search)}
COMPILED = ("planner", "search")
"""Benchmarks whose first run in a tree compiles: it is not counted."""


def main() -> None:
    """Run, print and record."""
    parser = argument_parser(
        __doc__, tree=("", "the commit to compare, in place of this tree"), rounds=3,
        only=(",".join(BENCHMARKS), "some benchmarks, separated by commas"),
        small=(False, "toy sizes, to try whether everything runs"),
    )  # fmt: skip
    parser.add_argument("commit", help="any name that git knows")
    given = parser.parse_args()
    unknown = set(given.only.split(",")) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    compared = given.tree or "this tree"
    header, rows = ("figure", given.commit, compared, "ratio", "smallest and largest"), []
    with trees(given.commit, given.tree or None) as (there, here):
        for name in given.only.split(","):
            measure = BENCHMARKS[name]
            for tree in (there, here) if name in COMPILED else ():
                measure(tree, given.small)
            pairs = []
            for number in range(given.rounds):
                order = (there, here) if number % 2 == 0 else (here, there)
                found = {tree: measure(tree, given.small) for tree in order}
                pairs.append((found[there], found[here]))
            for figure in pairs[0][0]:
                before, after = ([pair[i][figure] for pair in pairs] for i in (0, 1))
                ratios = sorted(b / a for a, b in zip(before, after, strict=True))
                medians = [f"{statistics.median(one):.4g}" for one in (before, after, ratios)]
                rows.append((figure, *medians, f"{ratios[0]:.3f} to {ratios[-1]:.3f}"))
                print(" | ".join(rows[-1]), flush=True)
    report(given.record, f"{given.tree or 'This tree'} against {given.commit}, {given.rounds} rounds", header, rows)


if __name__ == "__main__":
    main()
