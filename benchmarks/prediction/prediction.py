"""Predicted against measured: six models by five schedules over gloo, on two workers of one thread each.

There are two pairs of workers, of which only one computes at a time: one profiles and predicts, the other trains. For
each model:

1. The step is captured, and operators and links are measured. The model is cut into 2 stages, and into 4 on devices in
   a loop and in a fold. Cut by cut follow 2 to 5.
2. Profile. One step of the cut is rehearsed some times; both devices compute, and nothing is updated. Its order is none
   of the five: 1F1B, interleaved 1F1B or V-Half with the later half of their backwards in halves, for times of F, B, I
   and W alike. What messages cost the devices and what an optimizer step takes is measured, too.
3. The plans of this cut are created and their steps predicted from the profile. Plans and predictions are printed with
   their hash, and do not change from here on. None of these plans has run yet.
4. Each plan trains in the other pair. No other plan's parameters, optimizer state and freed memory are in those
   processes. Steps that warm up are separate. A step is the time between barriers around ``pipe.step``, optimizer
   included.
5. One more step of each is traced for the peak of its saved tensors, from the finalizers of their storages.

A machine that others share has another speed a few seconds later. Two workloads measure this drift. Both run after each
measured step:

- The profiled step. The pair that rehearsed it for the profile rehearses it again after each step of the other. So it
  is fixed arithmetic and memory traffic on all cores in the model's own shares, within a second of the measured step.
  It corrects no fault of a prediction: those of the profiled step are the same in both its times.
- The reference workload (`runtimes/profile/reference_workload`), as `compare` and reports use it. It stays within the
  caches of many machines, which most steps do not.

The drift of a measured step is the time of the workload after it ÷ its typical time in the profile. The error is
reported as it is, against the median of the measured steps, and corrected for drift: against the typical one of the
measured steps at the speed of the profile (`core/drift`). Typical is the Hodges–Lehmann estimate of logarithms
(`core/paired_difference`), which varies less than a median where noise is as large as on shared cores. The bounds are
on the error corrected by the profiled step.

The devices' busy times are compared, too: predicted, and the processor time that a worker's thread really took. And
what other processes took of the machine meanwhile: predictions are for a machine that nobody else uses.

    python benchmarks/prediction/prediction.py [--models GPT-2,BERT] [--schedules gpipe] [--steps 24] [--traces FOLDER]
                                               [--record benchmarks/results/prediction.md]

It exits with 1 where a bound is missed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch.multiprocessing as mp
from attrs import frozen
from panpipe.core.drift import steady_times
from panpipe.core.paired_difference import robust_geometric_mean
from panpipe.core.plan.plan import parse_plan
from prediction_models import MODELS
from prediction_workers import SCHEDULES, WARM_UP, Frozen, Measured, Rehearsed, Request, profiling, training

from benchmarks.recording import machine, record

STEPS = 12
"""Timed steps of each plan."""
MEDIAN, WORST, SAVED = 0.03, 0.10, 0.05
"""Bounds: of the median and the worst error of the step corrected for drift, and of the worst error of the saved
tensors' peak."""


@frozen
class Row:
    """One case.

    Args:
        model, schedule: which.
        digest: of the frozen plan with its prediction, SHA-256.
        predicted_s: the step.
        measured: its steps.
        rehearsed: the profiled steps in turns with them.
    """

    model: str
    schedule: str
    digest: str
    predicted_s: float
    measured: Measured
    rehearsed: Rehearsed

    @property
    def drift(self) -> float:
        """How much slower the profiled step was than in its profile, as a share."""
        return robust_geometric_mean(self.rehearsed.drifts) - 1

    @property
    def corrected(self) -> float:
        """The error of the step, corrected for the drift of the profiled step."""
        typical = robust_geometric_mean(steady_times(self.measured.steps_s, self.rehearsed.drifts))
        return self.predicted_s * (1 + self.drift) / typical - 1

    @property
    def reference_drift(self) -> float:
        """How much slower the reference workload was than in the profile, as a share."""
        return robust_geometric_mean(self.rehearsed.readings) - 1

    @property
    def corrected_by_reference(self) -> float:
        """The error of the step, corrected for the drift of the reference workload."""
        steady = steady_times(self.measured.steps_s, self.rehearsed.readings, 1.0)
        return self.predicted_s / robust_geometric_mean(steady) - 1

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.measured.steps_s)

    @property
    def error(self) -> float:
        """Of the step: above 0 the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def first_error(self) -> float:
        """Of the steps that warm up."""
        return self.predicted_s / statistics.median(self.measured.first_s) - 1

    @property
    def saved_error(self) -> float:
        """Of the peak of saved tensors, on the device where it is largest."""
        return _largest(self.measured.predicted_saved, self.measured.measured_saved)

    @property
    def busy_error(self) -> float:
        """Of the busy time, on the device where it is largest."""
        return _largest(self.measured.predicted_busy_s, self.measured.processor_s)


def _largest(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return max((p / m - 1 for p, m in zip(predicted, measured, strict=True)), key=abs)


def percent(value: float) -> str:
    """With sign."""
    return f"{100 * value:+.1f} %"


def megabytes(sizes: Sequence[float]) -> str:
    """By device."""
    return "/".join(f"{size / 1e6:.1f}" for size in sizes)


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    low, _, high = statistics.quantiles(row.measured.steps_s, n=4)
    return (
        row.model, row.schedule, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", f"{low:.3f}–{high:.3f}",
        percent(row.error), percent(row.drift), percent(row.corrected), percent(row.reference_drift),
        percent(row.corrected_by_reference), megabytes(row.measured.predicted_saved),
        megabytes(row.measured.measured_saved), percent(row.saved_error),
        percent(row.busy_error), row.digest[:12],
    )  # fmt: skip


def facts(row: Row) -> dict[str, Any]:
    """The same for programs."""
    return {
        "model": row.model, "schedule": row.schedule, "predicted_s": round(row.predicted_s, 4),
        "measured_s": round(row.measured_s, 4), "error": round(row.error, 4), "drift": round(row.drift, 4),
        "reference_drift": round(row.reference_drift, 4),
        "corrected_by_reference": round(row.corrected_by_reference, 4), "corrected_error": round(row.corrected, 4),
        "error_of_the_first_steps": round(row.first_error, 4),
        "predicted_saved_bytes": row.measured.predicted_saved, "measured_saved_bytes": row.measured.measured_saved,
        "saved_error": round(row.saved_error, 4), "busy_error": round(row.busy_error, 4),
        "foreign_share": round(row.measured.foreign, 3), "frozen": row.digest,
    }  # fmt: skip


HEADER = (
    "model", "schedule", "predicted s", "measured s", "quartiles", "error",
    "drift of the profiled step", "corrected by it", "drift of the reference workload", "corrected by it",
    "saved peak predicted MB", "measured MB", "error", "busy time against processor time", "frozen as",
)  # fmt: skip


def spread(errors: Sequence[float]) -> str:
    """Typical and worst."""
    return (
        f"median error {100 * statistics.median(map(abs, errors)):.1f} %, bias {percent(statistics.median(errors))}, "
        f"worst {percent(max(errors, key=abs))}"
    )


def extremes(drifts: Sequence[float]) -> str:
    """From the smallest to the largest."""
    return f"{percent(min(drifts))} to {percent(max(drifts))}"


def summary(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Lines for people, and whether every bound is kept."""
    raw, corrected = ([of(row) for row in rows] for of in (lambda row: row.error, lambda row: row.corrected))
    median, worst = statistics.median(map(abs, corrected)), max(rows, key=lambda row: abs(row.corrected))
    saved = max(rows, key=lambda row: abs(row.saved_error))
    reference = [row.corrected_by_reference for row in rows]
    lines = [
        f"step, corrected by the profiled step: median error {100 * median:.1f} % (bound {100 * MEDIAN:.0f} %), bias "
        f"{percent(statistics.median(corrected))}, worst {percent(worst.corrected)} in {worst.model} "
        f"{worst.schedule} (bound {100 * WORST:.0f} %)",
        f"step, corrected by the reference workload: {spread(reference)}",
        f"step as measured: {spread(raw)}",
        f"drift from profile to measurement: of the profiled step {extremes([row.drift for row in rows])}, "
        f"of the reference workload {extremes([row.reference_drift for row in rows])}",
        f"saved tensors: worst error of the peak {percent(saved.saved_error)} in {saved.model} {saved.schedule} "
        f"(bound {100 * SAVED:.0f} %)",
        f"the {WARM_UP} steps that warm up: median error "
        f"{100 * statistics.median(abs(row.first_error) for row in rows):.1f} %, bias "
        f"{percent(statistics.median(row.first_error for row in rows))}, worst "
        f"{percent(max((row.first_error for row in rows), key=abs))} (reported separately, without a bound)",
        "busy time against processor time: median "
        f"{100 * statistics.median(abs(row.busy_error) for row in rows):.1f} % on the device where it is worse",
        f"other processes took at most {100 * max(row.measured.foreign for row in rows):.0f} % of the machine during "
        "the measured steps of a plan",
    ]
    return lines, median <= MEDIAN and abs(worst.corrected) <= WORST and abs(saved.saved_error) <= SAVED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each plan, at most")
    parser.add_argument("--traces", help="write predicted and measured traces to this folder")
    parser.add_argument("--record", help="append the result to this Markdown file")
    arguments = parser.parse_args()
    models, schedules = arguments.models.split(","), arguments.schedules.split(",")
    for known, given, what in ((MODELS, models, "model"), (SCHEDULES, schedules, "schedule")):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"there is no {what} '{unknown[0]}': known are {', '.join(known)}")
    if arguments.steps < 2:
        parser.error(f"{arguments.steps} steps: quartiles need at least 2")
    request = Request(tuple(models), tuple(schedules), arguments.steps, arguments.traces)
    rows: list[Row] = []
    start = time.perf_counter()
    for row in measured_rows(request):
        rows.append(row)
        print(json.dumps(facts(row)), flush=True)
    lines, kept = summary(rows)
    lines.append(f"{time.perf_counter() - start:.0f} s in all, {arguments.steps} steps of each plan")
    print("\n".join(lines))
    if arguments.record:
        title = "Predicted against measured, two gloo workers"
        record(arguments.record, title, machine(), HEADER, [cells(row) for row in rows])
        with Path(arguments.record).open("a", encoding="utf-8") as file:
            file.write("\n".join(f"- {line}" for line in lines) + "\n\n")
    sys.exit(0 if kept else 1)


class Workers:
    """The two pairs.

    Args:
        request: what they measure.
    """

    def __init__(self, request: Request) -> None:
        context = mp.get_context("spawn")
        self._turns = context.Barrier(4)  # kept: a barrier that its maker has lost cannot be opened by others
        self._wires, self._processes = dict[str, list[Any]](), list[Any]()
        for pair in (profiling, training):
            self._wires[pair.__name__] = []
            for rank in range(2):
                ours, theirs = context.Pipe()
                self._wires[pair.__name__].append(ours)
                process = context.Process(target=pair, args=(rank, request, self._turns, theirs), daemon=True)
                process.start()
                self._processes.append(process)

    def answer(self, pair: str) -> Any:
        """The next message of a pair."""
        wire = self._wires[pair][0]
        while not wire.poll(1):
            dead = next((p for p in self._processes if not p.is_alive() and p.exitcode != 0), None)
            if dead is not None:
                raise SystemExit(f"a worker has stopped with {dead.exitcode}")
        return wire.recv()

    def train(self, plans: Frozen) -> None:
        """Send plans to the pair that trains."""
        for wire in self._wires["training"]:
            wire.send(plans)


def measured_rows(request: Request) -> Iterator[Row]:
    """One case after the other; the plans of a cut and their predictions are printed before any of them runs."""
    workers = Workers(request)
    for model, _, schedules in request.cuts():
        plans: Frozen = workers.answer("profiling")
        predicted = dict[str, float]()
        for schedule in schedules:
            prediction = parse_plan(plans.plans[schedule], schedule).prediction
            assert prediction is not None
            predicted[schedule] = prediction.step_s
            print(f"frozen: {model} {schedule} {prediction.step_s:.4f} s {plans.digest(schedule)}", file=sys.stderr)
        workers.train(plans)
        for schedule in schedules:
            rehearsed, measured = workers.answer("profiling"), workers.answer("training")
            yield Row(model, schedule, plans.digest(schedule), predicted[schedule], measured, rehearsed)


if __name__ == "__main__":
    main()
