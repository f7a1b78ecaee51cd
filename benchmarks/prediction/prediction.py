"""Predicted against measured steps and saved tensors, over gloo ranks of one thread each, quiet and loaded.

Each case is planned and predicted from the profile of its operators, before any step ran, and then trained; once alone,
and once next to four processes that compute all the time, by a plan that is made then. A step is the time between
barriers around ``pipe.step``, optimizer included. Errors are printed as they are: predicted ÷ measured − 1, for the
median of the measured steps and for the fastest. The peak of the saved tensors of each rank is measured by finalizers
of their storages in one more step: printed are the largest one, and the worst error of a rank.

    python benchmarks/prediction/prediction.py
        [--models GPT-2,BERT] [--schedules gpipe] [--loads 0,4] [--steps 6] [--ranks 2] [--record FILE]

The benchmark GPT is the model ``GPT``: ``--models GPT --schedules 1f1b,zb-v,v-half,v-min --ranks 4 --loads 0`` shows
what each schedule saves.
"""

import statistics
from typing import Any

import panpipe
import torch
import torch.distributed as dist
from panpipe.benchmarks import gpt
from panpipe.benchmarks.driver import Workers, argument_parser, busy, report, seconds
from panpipe.benchmarks.models import MICROBATCHES, MODELS

WARM_UP = 2
"""Steps of each case that are not timed."""
CASES: dict[str, Any] = {**MODELS, "GPT": lambda: (gpt.make(), gpt.step, gpt.data())}


def case(model_name: str, schedule: str, steps: int) -> tuple[float, list[float], list[tuple[float, float]]]:
    """Predicted and measured seconds, and for each rank the predicted and measured peak of saved tensors in MB."""
    torch.manual_seed(0)
    model, step, batch = CASES[model_name]()
    with panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.AdamW, microbatches=MICROBATCHES,
        plan=panpipe.Auto(schedule=schedule, contest=False, cache=False), run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        predicted = pipe.plan.predicted
        times = seconds(lambda: pipe.step(batch), WARM_UP + steps, dist.barrier)[WARM_UP:]
        _, trace = pipe.trace_step(batch)
    peaks = []
    for device, size in enumerate(predicted.peak_saved_bytes):
        own = [sample.bytes for sample in trace.memory if (sample.device, sample.kind) == (device, "saved")]
        peaks.append((size / 1e6, max(own) / 1e6))
    return predicted.step_s, times, peaks


def rank(number: int, steps: int) -> Any:
    """What a rank answers, for a model and a schedule."""
    return lambda asked: case(*asked, steps)


def main() -> None:
    options = argument_parser(
        __doc__, models=",".join(MODELS), schedules="1f1b,zb-v", steps=(6, "timed steps of each case"), ranks=2,
        loads=("0,4", "numbers of other processes that compute"),
    ).parse_args()  # fmt: skip
    ranks = Workers(options.ranks, rank, options.steps)
    rows, titles = [], []
    for load in map(int, options.loads.split(",")):
        errors = []
        for name in options.models.split(","):
            for schedule in options.schedules.split(","):
                with busy(load):
                    predicted_s, times, peaks = ranks.ask((name, schedule))[0]
                errors.append(abs(predicted_s / statistics.median(times) - 1))
                shown = (predicted_s, statistics.median(times), min(times), max(times))
                ratios = (predicted_s / shown[1], predicted_s / shown[2])
                largest = (max(sizes) for sizes in zip(*peaks, strict=True))
                rows.append((
                    name, schedule, f"{load}", *(f"{1e3 * each:.0f}" for each in shown),
                    *(f"{ratio - 1:+.1%}" for ratio in ratios), *(f"{size:.1f}" for size in largest),
                    f"{max(abs(predicted / found - 1) for predicted, found in peaks):.1%}",
                ))  # fmt: skip
                print(" | ".join(rows[-1]), flush=True)
        titles.append(
            f"{load} other processes: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        )
    ranks.close()
    header = (
        "model", "schedule", "other processes", "predicted ms", "median ms", "fastest", "slowest", "error",
        "error of the fastest", "most saved MB, predicted", "measured", "worst error of a rank",
    )  # fmt: skip
    report(options.record, f"error with {'; with '.join(titles)}", header, rows)


if __name__ == "__main__":
    main()
