"""The predicted step of a plan that offloads to a file, and the measured one, over two ranks of gloo.

python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/offload/offload_prediction.py [OPTIONS]

GPipe, so that the saved tensors of all microbatches leave; planning measures the operators and the rates of the copies.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import panpipe
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recording import machine, record

ROWS, MICROBATCHES, LENGTH = 32, 8, 256


class Layers(nn.Module):
    """Feed-forward layers of a transformer with residual connections.

    Args:
        layers: how many.
        width: of the residual stream.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def step(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each plan, after one more")
    parser.add_argument("--plans", type=int, default=3, help="how often the step is planned")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--offload", default="all")
    parser.add_argument("--folder", default="disk", help="folder of the file; by default that for temporary files")
    parser.add_argument("--record", help="append the result to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, errors = [], []
    for number in range(options.plans):
        torch.manual_seed(0)
        model, batch = Layers(options.layers, options.width), torch.randn(ROWS, LENGTH, options.width)
        pipe = panpipe.pipeline(
            model, step, batch, microbatches=MICROBATCHES, schedule="gpipe", max_chunks=1, optimizer=torch.optim.SGD,
            offload=options.offload, offload_to=options.folder, plan_cache=False, plan_seconds=3, progress=False,
        )  # fmt: skip
        took = []
        for _ in range(options.steps + 1):
            begun = time.perf_counter()
            pipe.step(batch)
            took.append(time.perf_counter() - begun)
        measured = statistics.median(took[1:])
        assert pipe.plan.prediction is not None
        predicted = pipe.plan.prediction.step_s
        errors.append(predicted / measured - 1)
        moved = sum(each.bytes * len(each.copies) for each in pipe.plan.memory.offload)
        spread = f"{min(took[1:]):.3f}–{max(took[1:]):.3f}"
        rows.append(
            [str(number), f"{moved / 1e6:.0f}", f"{predicted:.3f}", f"{measured:.3f}", spread, f"{errors[-1]:+.1%}"]
        )
        if dist.get_rank() == 0:
            print(" | ".join(rows[-1]), flush=True)
        pipe.close()
    if dist.get_rank() == 0:
        middle = statistics.median(map(abs, errors))
        title = (
            f"Predicted step with saved tensors in a file: {options.layers} layers, width {options.width}, 2 gloo "
            f"ranks, GPipe, {MICROBATCHES} microbatches; median error {middle:.1%}"
        )
        header = ("plan", "MB to the file and back", "predicted s", "measured s (median)", "spread", "error")
        print(title, " | ".join(header), sep="\n", flush=True)
        if options.record:
            record(options.record, title, machine(), header, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
