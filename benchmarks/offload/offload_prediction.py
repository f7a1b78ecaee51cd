"""The predicted step of plans that offload to a file, and the measured one, over two ranks of gloo.

python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/offload/offload_prediction.py [OPTIONS]

Planning measures the operators and the rates of the copies, as by default; each case is a model and a schedule.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import panpipe
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recording import machine, record

ROWS, MICROBATCHES, LENGTH, WIDTH, HEADS = 32, 8, 256, 256, 4


class FeedForward(nn.Module):
    """A feed-forward layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    """A depthwise and a pointwise convolution over the sequence, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.up, self.down = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.depthwise(x.transpose(1, 2))))).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: nn.Sequential(*(FeedForward() for _ in range(6))),
    "transformer": lambda: nn.Sequential(*(layer() for _ in range(4) for layer in (Attention, FeedForward))),
    "convolution": lambda: nn.Sequential(*(Convolution() for _ in range(6))),
}
"""Of inputs of shape (rows, LENGTH, WIDTH)."""
CASES = "feed-forward:gpipe,transformer:gpipe,convolution:gpipe,feed-forward:1f1b,transformer:1f1b,feed-forward:gis-h"


def step(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def measured(case: str, options: argparse.Namespace) -> tuple[list[str], float]:
    """A row of the table, and the relative error of the prediction. All ranks call this together."""
    name, schedule = case.split(":")
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(ROWS, LENGTH, WIDTH)
    pipe = panpipe.pipeline(
        model, step, batch,
        optimizer=torch.optim.SGD, microbatches=MICROBATCHES,
        plan=panpipe.Auto(schedule=schedule, max_chunks=options.chunks, cache=False),
        memory=panpipe.Memory(offload=options.offload, offload_to=options.folder), run=panpipe.Run(progress=False),
    )  # fmt: skip
    assert pipe.plan.prediction is not None
    predicted, took = pipe.plan.prediction.step_s, []
    for _ in range(options.steps + 1):
        begun = time.perf_counter()
        pipe.step(batch)
        took.append(time.perf_counter() - begun)
    middle = statistics.median(took[1:])
    moved = sum(each.bytes * len(each.copies) for each in pipe.plan.memory.offload)
    pipe.close()
    spread = f"{min(took[1:]):.3f}–{max(took[1:]):.3f}"
    error = predicted / middle - 1
    what = f"{name}, {pipe.plan.schedule}, {len(pipe.plan.stages)} stages"
    row = [what, f"{moved / 1e6:.0f}", f"{predicted:.3f}", f"{middle:.3f}", spread, f"{error:+.1%}"]
    return row, error


def _errors(name: str, found: list[float]) -> str:
    sizes = [abs(error) for error in found]
    return f"{name} {statistics.median(sizes):.1%} in the median, {max(sizes):.1%} at most" if sizes else f"no {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each plan, after one more")
    parser.add_argument("--cases", default=CASES, help="model:schedule, with commas between")
    parser.add_argument("--chunks", type=int, default=1, help="most stages of a device")
    parser.add_argument("--offload", default="all")
    parser.add_argument("--folder", default="disk", help="folder of the file; by default that for temporary files")
    parser.add_argument("--record", help="append the result to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, errors = [], list[float]()
    for case in options.cases.split(","):
        row, error = measured(case, options)
        rows.append(row)
        errors.append(error)
        if dist.get_rank() == 0:
            print(" | ".join(row), flush=True)
    if dist.get_rank() == 0:
        title = (
            f"Predicted step with saved tensors in a file: width {WIDTH}, 2 gloo ranks, {MICROBATCHES} microbatches; "
            f"{_errors('error', errors)}"
        )
        header = ("plan", "MB to the file", "predicted s", "measured s (median)", "spread", "error")
        print(title, " | ".join(header), sep="\n", flush=True)
        if options.record:
            record(options.record, title, machine(), header, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
