"""Predicted against measured: six models by two schedules over two gloo ranks of one thread each, quiet and loaded.

Each case is planned and predicted from the profile of its operators, before any step ran, and then trained; once alone,
and once next to four processes that compute all the time, by a plan that is made then. A step is the time between
barriers around ``pipe.step``, optimizer included. Errors are printed as they are: predicted ÷ measured − 1, for the
median of the measured steps and for the fastest.

    torchrun --nproc-per-node 2 benchmarks/prediction/prediction.py
        [--models GPT-2,BERT] [--schedules gpipe] [--loads 0,4] [--steps 6] [--record FILE]
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
import torch.distributed as dist

from benchmarks.driver import argument_parser, busy, report
from benchmarks.models import MICROBATCHES, MODELS

SCHEDULES = ("1f1b", "zb-v")
WARM_UP = 2
"""Steps of each case that are not timed."""


def case(model_name: str, schedule: str, load: int, steps: int) -> tuple[list[str], float]:
    """A row of the table, and the error. All ranks call this together."""
    torch.manual_seed(0)
    model, step, batch = MODELS[model_name]()
    with busy(load) if dist.get_rank() == 0 else contextlib.nullcontext():
        pipe = panpipe.pipeline(
            model, step, batch, optimizer=torch.optim.AdamW, microbatches=MICROBATCHES,
            plan=panpipe.Auto(schedule=schedule, contest=False, cache=False), run=panpipe.Run(progress=False),
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
    error, of_fastest = predicted_s / statistics.median(timed) - 1, predicted_s / min(timed) - 1
    shown = (predicted_s, statistics.median(timed), min(timed), max(timed))
    numbers = [*(f"{1e3 * seconds:.0f}" for seconds in shown), f"{error:+.1%}", f"{of_fastest:+.1%}"]
    return [model_name, schedule, f"{load}", *numbers], error


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--loads", default="0,4", help="numbers of other processes that compute")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, titles = [], []
    for load in map(int, options.loads.split(",")):
        errors = []
        for name in options.models.split(","):
            for schedule in options.schedules.split(","):
                row, error = case(name, schedule, load, options.steps)
                rows.append(row)
                errors.append(abs(error))
                if dist.get_rank() == 0:
                    print(" | ".join(row), flush=True)
        titles.append(
            f"{load} other processes: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        )
    if dist.get_rank() == 0:
        header = ("model", "schedule", "other processes", "predicted ms", "median ms", "fastest", "slowest", "error",
                  "error of the fastest")  # fmt: skip
        report(options.record, f"error with {'; with '.join(titles)}", header, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
