"""What comparing the values that a step reads costs: python benchmarks/runtime/reads.py [--rounds N] [--record FILE].

Of a GPT of 12 layers: the comparison that each step makes, the walk that finds the values again where one changed, and
one step of eager PyTorch on 4 rows of 128 tokens. Medians over rounds, with the quartiles.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from panpipe.answers.output import print_table
from panpipe.core.capture.python.guards import Guards

from benchmarks import gpt
from benchmarks.recording import machine, record

LAYERS, ROWS, LENGTH, VOCABULARY = 12, 4, 128, 1024
HEADER = ("what", "median", "quartiles", "share of the step")


def seconds(rounds: int, calls: int, run: Callable[[], object]) -> list[float]:
    """Seconds of one call, for each round."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", metavar="FILE")
    arguments = parser.parse_args()
    model = gpt.stack(gpt.Block, gpt.WIDTH, LAYERS, VOCABULARY)
    batch = gpt.data(ROWS, LENGTH, VOCABULARY)
    reads = Guards(model, gpt.step)
    found = {
        "comparison": seconds(arguments.rounds, 20, reads.unchanged),
        "walk": seconds(arguments.rounds, 1, functools.partial(Reads, model, gpt.step)),
        "step": seconds(arguments.rounds, 1, lambda: gpt.step(model, batch).backward()),
    }
    step = statistics.median(found["step"])
    rows = []
    for what, times in found.items():
        low, median, high = statistics.quantiles(times, n=4)
        rows.append((what, f"{median * 1e3:.3f} ms", f"{low * 1e3:.3f} to {high * 1e3:.3f} ms", f"{median / step:.2%}"))
    print_table("", HEADER, rows)
    if arguments.record:
        record(arguments.record, "What comparing the values that a step reads costs", machine(), HEADER, rows)


if __name__ == "__main__":
    main()
