"""Predicted against measured: six models by five schedules over two gloo ranks of one thread each.

Each case is planned and predicted from the profile of its operators, before any step ran, and then trained. A step is
the time between barriers around ``pipe.step``, optimizer included. Errors are printed as they are: predicted ÷ the
median of the measured steps − 1.

    torchrun --nproc-per-node 2 benchmarks/prediction/prediction.py
        [--models GPT-2,BERT] [--schedules gpipe] [--steps 12] [--record FILE]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
import torch.distributed as dist
from prediction_models import MICROBATCHES, MODELS

from benchmarks.recording import machine, record

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
WARM_UP = 2
"""Steps of each case that are not timed."""


def case(model_name: str, schedule: str, steps: int) -> tuple[list[str], float]:
    """A row of the table, and the error. All ranks call this together."""
    torch.manual_seed(0)
    model, step, batch = MODELS[model_name]()
    pipe = panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, schedule=schedule, contest=False,
        plan_cache=False, progress=False,
    )  # fmt: skip
    predicted_s, times = pipe.plan.predicted.step_s, list[float]()
    for _ in range(WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        pipe.step(batch)
        dist.barrier()
        times.append(time.perf_counter() - start)
    pipe.close()
    timed = times[WARM_UP:]
    error = predicted_s / statistics.median(timed) - 1
    shown = (predicted_s, statistics.median(timed), min(timed), max(timed))
    return [model_name, schedule, *(f"{1e3 * seconds:.0f}" for seconds in shown), f"{error:+.1%}"], error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each case")
    parser.add_argument("--record", help="append the table to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, errors = [], list[float]()
    for name in options.models.split(","):
        for schedule in options.schedules.split(","):
            row, error = case(name, schedule, options.steps)
            rows.append(row)
            errors.append(abs(error))
            if dist.get_rank() == 0:
                print(" | ".join(row), flush=True)
    if dist.get_rank() == 0:
        title = f"error {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        print(title)
        if options.record:
            header = ("model", "schedule", "predicted ms", "median ms", "fastest", "slowest", "error")
            record(options.record, title, machine(), header, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
