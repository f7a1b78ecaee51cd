"""``make zoo``: trains every model of the zoo, writes the table of what was found, and prints a summary.

Results are kept in a file as they come. Models that are named are trained again, and the table keeps what the file has
of the others; ``--missing`` goes on with a run that was interrupted.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.driver import machine
from tests.laws.zoo.measured import HERE, Measured, Result
from tests.laws.zoo.models import ZOO
from tests.laws.zoo.run import run_zoo

TABLE = HERE / "benchmarks" / "results" / "zoo.md"
RESULTS = HERE / "out" / "zoo.jsonl"
KINDS = ("loss", "gradient", "parameter", "buffer")
PLANS = 9
"""Checks of one model: three by threads, and three on each of two ranks (`worker`)."""


def worst(results: list[Result], kind: str) -> str:
    found = max((result.get(kind, float("inf")) for result in results), default=float("inf"))
    return f"{found:.0e}" if found else "0"


def outcome(results: list[Result]) -> str:
    """Of one model: the worst of its checks; ``not run`` where some are missing and none is wrong."""
    found = {result["outcome"] for result in results}
    if not found or (found == {"right"} and len(results) != PLANS):
        return "not run"
    return found.pop() if found in ({"right"}, {"refused"}) else "wrong" if "wrong" in found else "crashed"


def problem_of(results: list[Result]) -> str:
    """What is wrong with a model; what an error says rather than that a process died of it."""
    found = [result["problem"] for result in results if result.get("problem")]
    return min(found, key=lambda problem: problem.startswith("died"), default="")


def row(name: str, results: list[Result]) -> str:
    entry = ZOO[name]
    right = sum(result["outcome"] == "right" for result in results)
    kind = next((result["dtype"] for result in results if "dtype" in result), "–")
    at = results[0]["commit"] if results else "–"
    if outcome(results) == "refused":
        return (
            f"| {name} | {entry.source} | refused | {kind} | – | – | – | – | {at} | {entry.shows}: “{entry.refusal}” |"
        )
    distances = " | ".join(worst(results, kind) for kind in KINDS)
    remark = "; ".join(text for text in (entry.shows, problem_of(results).replace("|", "/")) if text)
    return f"| {name} | {entry.source} | {right}/{PLANS} | {kind} | {distances} | {at} | {remark} |"


def summary(by_model: Mapping[str, list[Result]]) -> dict[str, int]:
    """How many models have each outcome."""
    found = [outcome(results) for results in by_model.values()]
    return {kind: found.count(kind) for kind in ("right", "refused", "wrong", "crashed", "not run")}


def table(by_model: Mapping[str, list[Result]], seconds: float) -> str:
    count = summary(by_model)
    rows = "\n".join(row(name, found) for name, found in by_model.items())
    left = f" {count['not run']} were not run." if count["not run"] else ""
    return f"""# The zoo

Of {len(by_model)} models {count["right"]} train as one process does, by every plan: the automatic one and V-Half, by
two threads and on two ranks over gloo, 1F1B by three threads, and GPipe with recompute on two ranks; a check counts on
each rank. {count["refused"]} are refused before training, with the message that is expected; {count["wrong"]} are
wrong, {count["crashed"]} crash or are refused otherwise.{left} “at” is the commit. Its runs took
{seconds / 60:.1f} minutes together, on {machine()}.

Distances are the largest over the plans, to the untouched eager model after two steps of AdamW on the same
microbatches, with the same random numbers: the loss of any step, gradients relative in norm, and elements of parameters
and buffers. float64 has to be within 1e-9; float32, where an operator has no other form, within 1e-4, and gradients
within 1e-5. A gradient whose norm is less than 1e-5 of that of all gradients (float32: 1e-4) is compared relative to
that share. What is not finite counts as wrong.

| model | from | plans | in | loss | gradients | parameters | buffers | at | |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of them by default", metavar="MODEL")
    parser.add_argument("--missing", action="store_true", help="only models of which the file has no complete results")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds, after which --missing can go on; 0 only writes the table"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that share the models")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in ZOO]:
        parser.error(f"the zoo has no {', '.join(unknown)}: it has {', '.join(ZOO)}")
    measured = Measured(arguments.results)
    names = arguments.names or list(ZOO)
    if arguments.missing:
        names = [name for name in names if outcome(measured.of(name)) not in ("right", "refused")]
    names = names if arguments.limit else []
    start, done = time.monotonic(), 0

    def report(result: Result) -> None:
        nonlocal done
        done += 1
        measured.add(result)
        if sys.stderr.isatty():
            print(f"\r{done} of {PLANS * len(names)} checks, {time.monotonic() - start:.0f} s", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        run_zoo(names, Path(folder), arguments.limit, report, arguments.workers)
    by_model = {name: measured.of(name) for name in ZOO}
    arguments.out.write_text(table(by_model, measured.seconds()), encoding="utf-8")
    count = summary(by_model)
    print(f"{arguments.out}: " + ", ".join(f"{number} {kind}" for kind, number in count.items()))
    for name, found in by_model.items():
        if (kind := outcome(found)) in ("wrong", "crashed"):
            print(f"{kind}: {name}: {problem_of(found) or 'differs'}")
    return 0 if not count["wrong"] and not count["crashed"] and not count["not run"] else 1


if __name__ == "__main__":
    sys.exit(main())
