"""What the guards of a step cost: python benchmarks/runtime/guards.py [--rounds N] [--record FILE].

Of transformers' Llama of 32 layers with a tiny width: the comparison that each step makes, finding the values again
where one changed, and one step of eager PyTorch on 4 rows of 32 tokens. The fastest of all rounds, since noise only
ever makes them slower, and medians with the quartiles.
"""

import functools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers
from panpipe.core.capture.python.guards import Guards

from benchmarks.driver import argument_parser, report, seconds

LAYERS, ROWS, LENGTH, VOCABULARY = 32, 4, 32, 64
HEADER = ("what", "fastest", "median", "quartiles")


def step(model: Any, batch: Any) -> Any:
    """The loss of a language model."""
    return model(**batch).loss


def main() -> None:
    """Run it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(VOCABULARY, (ROWS, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    guards = Guards(model, step)
    found = {
        "comparison": seconds(guards.unchanged, 10 * arguments.rounds, 50),
        "finding the values": seconds(functools.partial(Guards, model, step), arguments.rounds),
        "step": seconds(lambda: step(model, batch).backward(), arguments.rounds),
    }
    rows = []
    for what, times in found.items():
        low, median, high = statistics.quantiles(times, n=4)
        spread = f"{low * 1e3:.3f} to {high * 1e3:.3f} ms"
        rows.append((what, f"{min(times) * 1e3:.3f} ms", f"{median * 1e3:.3f} ms", spread))
    report(arguments.record, "What the guards of a step cost", HEADER, rows)


if __name__ == "__main__":
    main()
