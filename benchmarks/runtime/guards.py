"""What the guards of a step cost: python benchmarks/runtime/guards.py [--rounds N] [--record FILE].

Of transformers' Llama of 32 layers with a tiny width: the comparison that each step makes, finding the values again
where one changed, and one step of eager PyTorch on 4 rows of 32 tokens. The fastest of all rounds, since noise only
ever makes them slower, and medians with the quartiles.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers
from panpipe.answers.output import print_table
from panpipe.core.capture.python.guards import Guards

from benchmarks.recording import machine, record

LAYERS, ROWS, LENGTH, VOCABULARY = 32, 4, 32, 64
HEADER = ("what", "fastest", "median", "quartiles")


def step(model: Any, batch: Any) -> Any:
    """The loss of a language model."""
    return model(**batch).loss


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
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(VOCABULARY, (ROWS, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    guards = Guards(model, step)
    found = {
        "comparison": seconds(10 * arguments.rounds, 50, guards.unchanged),
        "finding the values": seconds(arguments.rounds, 1, functools.partial(Guards, model, step)),
        "step": seconds(arguments.rounds, 1, lambda: step(model, batch).backward()),
    }
    rows = []
    for what, times in found.items():
        low, median, high = statistics.quantiles(times, n=4)
        spread = f"{low * 1e3:.3f} to {high * 1e3:.3f} ms"
        rows.append((what, f"{min(times) * 1e3:.3f} ms", f"{median * 1e3:.3f} ms", spread))
    print_table("", HEADER, rows)
    if arguments.record:
        record(arguments.record, "What the guards of a step cost", machine(), HEADER, rows)


if __name__ == "__main__":
    main()
