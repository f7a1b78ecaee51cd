"""``make zoo``: trains every model of the zoo, and writes the table of what was found."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.recording import machine
from tests.zoo.models import ZOO
from tests.zoo.run import Result, run_zoo

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "zoo.md"
KINDS = ("loss", "gradient", "parameter", "buffer")
PLANS = 8
"""Checks of one model: two and three devices, 1F1B and V-Half, threads and gloo."""


def worst(results: list[Result], kind: str) -> str:
    found = max((result.get(kind, float("inf")) for result in results), default=float("inf"))
    return f"{found:.0e}" if found else "0"


def row(name: str, results: list[Result]) -> str:
    entry = ZOO[name]
    right = sum(result["right"] for result in results)
    first = next((result for result in results if "operators" in result), {})
    python = ", ".join(first.get("python", ()))
    problem = next((result["problem"] for result in results if result["problem"]), "")
    remark = "; ".join(text for text in (entry.shows, f"Python: {python}" if python else "", problem) if text)
    distances = " | ".join(worst(results, kind) for kind in KINDS)
    kind = first.get("dtype", "–")
    count = first.get("operators", "–")
    return f"| {name} | {entry.source} | {right}/{PLANS} | {kind} | {count} | {distances} | {remark} |"


def table(results: list[Result], names: list[str], seconds: float) -> str:
    by_model = {name: [result for result in results if result["model"] == name] for name in names}
    right = sum(sum(r["right"] for r in found) == PLANS for found in by_model.values())
    kept = sum(any(r.get("python") for r in found) for found in by_model.values())
    rows = "\n".join(row(name, found) for name, found in by_model.items())
    return f"""# The zoo

{right} of {len(names)} models train as one process does, by every plan: 1F1B and V-Half, on two and on three devices,
over threads and over gloo. {kept} of them keep some of their Python, on one stage each. Taken in
{seconds / 60:.1f} minutes on {machine()}.

Distances are the largest over the plans, to the untouched eager model after two steps of AdamW on the same
microbatches, with the same random numbers: the loss of any step, gradients relative in norm, and elements of parameters
and buffers. float64 has to be within 1e-9; float32, where an operator has no other form, within 1e-4, and gradients
within 1e-5.

| model | from | plans | in | operators | loss | gradients | parameters | buffers | |
|---|---|---|---|---|---|---|---|---|---|
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of them by default")
    parser.add_argument("--limit", type=float, default=1500, help="seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table")
    arguments = parser.parse_args()
    names = arguments.names or list(ZOO)
    start = time.monotonic()

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {PLANS * len(names)} checks, {time.monotonic() - start:.0f} s", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        results = run_zoo(names, Path(folder), arguments.limit, progress)
    text = table(results, names, time.monotonic() - start)
    arguments.out.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(result["right"] for result in results) and len(results) == PLANS * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
