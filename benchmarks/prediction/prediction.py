"""Predicted against measured: six models by five schedules over gloo, on two workers of one thread each.

For each model, on two workers that live for the whole run:

1. The step is captured, and operators and links are measured. The model is cut into 2 stages, and into 4 on devices in
   a loop and in a fold. Cut by cut follow 2 to 5.
2. Profile. One step of the cut is rehearsed some times; both devices compute, and nothing is updated. Its order is none
   of the five: 1F1B, interleaved 1F1B or V-Half with the later half of their backwards in halves, for times of F, B, I
   and W alike. What messages cost the devices and what an optimizer step takes is measured, too.
3. The plans of this cut are created and their steps predicted from the profile. Plans and predictions are printed with
   their hash, and do not change from here on. None of these plans has run yet.
4. Each plan trains by itself, as it was profiled: its steps follow each other, and no other plan's parameters,
   optimizer state and freed memory are in the process (pipelines that take turns have steps up to 14 % longer). Steps
   that warm up are separate; the measured time is the median of the others. A step is the time between barriers around
   ``pipe.step``, optimizer included. Steps follow until the bounds of the typical one are within ``CLOSE`` of it, at
   least ``LEAST`` and at most ``--steps``.
5. One more step of each is traced for the peak of its saved tensors, from the finalizers of their storages.

A machine that others share has another speed a few minutes later. Two workloads measure its drift:

- The reference workload (`runtimes/profile/reference_workload`) is timed on both cores before and after each profiled
  and each measured step. It stays within the caches of many machines, as small steps do and large ones do not.
- The profiled step itself: after each plan the same step of the same cut is rehearsed again, in a new pipeline, as it
  was for the profile. It is fixed arithmetic and memory traffic in the model's own shares. The drift of a plan is the
  typical one of the rehearsed steps right before and right after it ÷ the typical one of the profile. A prediction that
  is wrong stays wrong: what was rehearsed for the profile and what is rehearsed later have the same errors.

The error is reported as it is, against the median of the measured steps, and corrected by each: against the typical one
of the measured steps at the speed of the profile. Typical is the Hodges–Lehmann estimate of logarithms
(`core/paired`), which varies less than a median where noise is as large as on shared cores. The bounds are on the error
corrected by rehearsed steps.

The devices' busy times are compared, too: predicted, and the processor time that a worker's thread really took. And
what other processes took of the machine meanwhile: predictions are for a machine that nobody else uses.

    python benchmarks/prediction/prediction.py [--models GPT-2,BERT] [--schedules gpipe] [--steps 24] [--traces FOLDER]
                                               [--record benchmarks/results/prediction.md]

It exits with 1 where a bound is missed.
"""

import argparse
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attrs import asdict, evolve, frozen
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.costs import StageCosts, stage_edges
from panpipe.core.costs.partition import device_limits
from panpipe.core.drift import steady_times
from panpipe.core.paired import difference, robust_geometric_mean
from panpipe.core.plan.plan import Plan, Prediction, plan_json
from panpipe.core.schedules.construction.early import early_gradients
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.options import options, schedule_problem
from panpipe.core.trace.figures import peak_memory
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.batch.microbatches import split_batch
from panpipe.runtimes.devices.heap import give_back_freed_memory, keep_freed_memory
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.planning.automatic import PLAIN, Planning
from panpipe.runtimes.planning.measurements import Stages
from panpipe.runtimes.planning.options import PlanningOptions
from panpipe.runtimes.planning.rehearsed import (
    Rehearsal,
    RehearsedProfile,
    length_ratio,
    rehearsed_profile,
    times_scaled,
)
from panpipe.runtimes.profile.measured_cluster import measured_cluster
from panpipe.runtimes.profile.reference_workload import reference_s
from panpipe.runtimes.rehearsal import TYPICAL
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate
from prediction_models import MICROBATCHES, MODELS

from benchmarks.recording import machine, record

PORT = 29690
SCHEDULES = {"gpipe": "1f1b", "1f1b": "1f1b", "zb-h1": "1f1b", "interleaved-1f1b": "interleaved-1f1b", "zb-v": "v-half"}
"""Schedules, and for each the one that cuts are searched for and whose placement is rehearsed."""
CHUNKS = {"1f1b": 1, "interleaved-1f1b": 2, "v-half": 2}
"""Stages a device of what is rehearsed."""
REHEARSED, LEAST, STEPS, CLOSE = 8, 8, 12, 0.015
"""Rehearsed steps of each cut; least and largest number of timed steps of each plan, and the share of a step within
which both bounds of the typical one are when no more steps follow. On two cores that others share, medians of 8 steps,
each divided by the reference readings around it, varied by 2.8 % (GPT-2) and 3.7 % (ResNet), of 12 steps by 2.5 and
3.1 %, of 24 by 1.2 and 1.5 % (there, ``--steps 24``); on two cores of their own steps vary less, and 8 are enough."""
WARM_UP = 2
"""Steps of each plan, and of each rehearsal, before those that count."""
MEDIAN, WORST, SAVED = 0.03, 0.10, 0.05
"""Bounds: of the median and the worst error of the step corrected for drift, and of the worst error of the saved
tensors' peak."""


@frozen
class Row:
    """One case.

    Args:
        model, schedule: which.
        frozen: of the plan with its prediction, SHA-256.
        predicted_s, steps_s: the step as predicted, and as measured.
        first_s: the steps that warm up.
        predicted_saved, measured_saved: peak of saved tensors by device, in bytes.
        predicted_busy_s, processor_s: by device; the second is the median over steps.
        foreign: what other processes took of all processors while the model was measured, as a share of their time.
        drifts: of each measured step: how many times as long the reference workload took around it as while the cut
            was profiled.
        rehearsed_drift: how many times as long the profiled step took, before and after the measured ones.
    """

    model: str
    schedule: str
    frozen: str
    predicted_s: float
    steps_s: tuple[float, ...]
    first_s: tuple[float, ...]
    predicted_saved: tuple[float, ...]
    measured_saved: tuple[float, ...]
    predicted_busy_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    foreign: float
    drifts: tuple[float, ...]
    rehearsed_drift: float

    @property
    def drift(self) -> float:
        """How much slower the machine was while the plan was measured than while its costs were, as a share."""
        return robust_geometric_mean(self.drifts) - 1

    @property
    def corrected_by_reference(self) -> float:
        """The error of the step, corrected for the drift of the reference workload."""
        return self.predicted_s / robust_geometric_mean(steady_times(self.steps_s, self.drifts, 1.0)) - 1

    @property
    def corrected(self) -> float:
        """The error of the step, corrected for the drift of the profiled step."""
        typical = robust_geometric_mean(steady_times(self.steps_s, self.drifts))
        return self.predicted_s * self.rehearsed_drift / typical - 1

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Of the step: above 0 the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def first_error(self) -> float:
        """Of the steps that warm up."""
        return self.predicted_s / statistics.median(self.first_s) - 1

    @property
    def saved_error(self) -> float:
        """Of the peak of saved tensors, on the device where it is largest."""
        errors = [p / m - 1 for p, m in zip(self.predicted_saved, self.measured_saved, strict=True)]
        return max(errors, key=abs)

    @property
    def busy_error(self) -> float:
        """Of the busy time, on the device where it is largest."""
        return max((p / m - 1 for p, m in zip(self.predicted_busy_s, self.processor_s, strict=True)), key=abs)


class ProcessorTimes:
    """What the whole machine and this run's workers have computed.

    Args:
        team: the workers.
    """

    def __init__(self, team: RankTeam) -> None:
        self._team = team
        self._since = self._now()

    def _now(self) -> tuple[float, float, float]:
        """All processors' seconds, those not idle, and those of the workers."""
        fields = [int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        own = sum(self._team.everywhere(lambda _: time.process_time()))
        return sum(fields) / tick, (sum(fields) - fields[3] - fields[4]) / tick, own

    def foreign(self) -> float:
        """The share of all processors that others took since this was made."""
        everything, busy, own = (now - then for now, then in zip(self._now(), self._since, strict=True))
        return max(0.0, (busy - own) / everything)


@frozen
class Profile:
    """What the rehearsal of a cut showed.

    Args:
        plan: the rehearsed one.
        programs: costs.
        ratio: what the rehearsed steps took ÷ what these costs predict for them.
        reference_s: of the reference workload meanwhile: the speed for which the costs hold.
        steps_s: the rehearsed steps, without the noise that the reference workload shows.
    """

    plan: Plan
    programs: RehearsedProfile
    ratio: float
    reference_s: float
    steps_s: tuple[float, ...]

    @property
    def stages(self) -> Stages:
        """Operators of each."""
        return tuple(stage.nodes for stage in self.plan.stages)

    def drift(self, rehearsed_s: Sequence[float]) -> float:
        """How many times as long the rehearsed step takes in these later steps."""
        return robust_geometric_mean(rehearsed_s) / robust_geometric_mean(self.steps_s)


class Case:
    """One model on the workers.

    Args:
        name: of the model.
        team: the workers.
    """

    def __init__(self, name: str, team: RankTeam) -> None:
        self.name, self.team = name, team
        torch.manual_seed(0)
        model, self.step, self.batch = MODELS[name]()
        self.piece = split_batch(self.batch, MICROBATCHES)[0]
        self.operators = operators_of(capture_step(model, self.step, self.piece.batch))
        wanted = PlanningOptions(oracle=simulated, cut_oracle=longest_path, schedule=PLAIN)
        example = Example(model, self.step, self.piece, self.operators)
        self.planning = Planning(example, MICROBATCHES, team, wanted, torch.optim.AdamW)
        self.cluster = measured_cluster(team, torch.device("cpu"))
        self.graph = self.planning.measured.graph()

    def plan(self, schedule: str, stages: Stages, costs: Sequence[StageCosts]) -> Plan:
        """The plan of a schedule, with the first of its parameters, as predicted from these costs of its stages."""
        family = find_family(schedule)
        limits, edges = device_limits(self.cluster, None), stage_edges(self.graph, stages)
        placement = family.placement(self.team.size, len(stages) // self.team.size)
        problem = schedule_problem(
            self.cluster, MICROBATCHES, placement=placement, costs=costs, edges=edges, limits=limits
        )
        built = next(made for option in options([family], problem) if (made := option.build(problem)) is not None)
        plan = assemble(self.graph, stages, built, parameter_sizes=self.planning.measured.sizes, edges=edges)
        return self.team.decide(lambda: with_prediction(plan, tuple(costs), self.cluster))

    def ready(self, plan: Plan) -> Pipeline:
        """The pipeline of a plan, with a new model."""
        torch.manual_seed(0)
        model = MODELS[self.name]()[0]
        example = Example(model, self.step, self.piece, self.operators)
        training = Training(optimizer=torch.optim.AdamW)
        return Pipeline(example, plan, self.team, training, self.planning.programs)

    def profile(self, name: str) -> "Profile":
        """Rehearse a step of a cut, by itself, as its plans train later."""
        stages = self.planning.cuts(self.cluster).search(self.graph, CHUNKS[name], [find_family(name)])
        assert stages is not None
        known = self.planning.measured.costs_of(stages)
        plan = self.plan(name, stages, known)
        orders = early_gradients(plan.device_actions, plan.placement, MICROBATCHES // 2)
        rehearsed, seen = self.rehearsed(evolve(plan, schedule="rehearsal", device_actions=orders))
        profile = rehearsed_profile([(rehearsed, known, seen)], TYPICAL)
        typical, took = robust_geometric_mean([one.reference_s for one in seen]), steady(seen)
        ratio = length_ratio(rehearsed, profile.of(rehearsed), took, simulated)
        return Profile(rehearsed, profile, ratio, typical, tuple(took))

    def rehearsed(self, plan: Plan) -> tuple[Plan, list[Rehearsal]]:
        """Rehearsed steps of a plan in a new pipeline, and its plan."""
        pipe = self.ready(plan)
        seen = pipe.rehearse(self.batch, REHEARSED, WARM_UP)
        plan = pipe.plan
        del pipe
        freed()
        return plan, seen

    def predicted(self, schedules: Sequence[str], known: "Profile") -> dict[str, Plan]:
        """The plans of schedules of a profiled cut with their predictions, none of which has run."""
        found = {}
        for name in schedules:
            plan = self.plan(name, known.stages, known.programs.costs[known.stages])
            found[name] = with_prediction(plan, times_scaled(known.programs.of(plan), known.ratio), self.cluster)
        return found

    def measured(self, pipe: Pipeline, steps: int) -> "Times":
        """Steps of a plan that trains by itself."""
        first = [self._step(pipe)[0] for _ in range(WARM_UP)]
        found, speeds = [], [reference_s(self.team)]
        around = list[float]()
        while len(found) < steps:
            found.append(self._step(pipe))
            speeds.append(reference_s(self.team))
            around.append(statistics.fmean(speeds[-2:]))
            close = partial(is_close, steady_times([step[0] for step in found], around))
            if len(found) >= LEAST and self.team.decide(close):
                break
        wall, own = zip(*found, strict=True)
        return Times(wall, statistics.median(own), tuple(first), tuple(around))

    def _step(self, pipe: Pipeline) -> tuple[float, float]:
        """Seconds of a step, and the processor's seconds of this worker's thread in it."""
        dist.barrier()
        start, before = time.perf_counter(), time.thread_time()
        pipe.step(self.batch)
        own = time.thread_time() - before
        dist.barrier()
        return time.perf_counter() - start, own


@frozen
class Times:
    """What steps of a plan took, in seconds.

    Args:
        wall: by the clock.
        own: of the processor, for this worker's thread; the median.
        first: by the clock, of those that warm up.
        references_s: of the reference workload around each step: the mean of before and after.
    """

    wall: tuple[float, ...]
    own: float
    first: tuple[float, ...]
    references_s: tuple[float, ...]


def steady(seen: Sequence[Rehearsal]) -> list[float]:
    """The times of rehearsed steps, without the noise that the reference workload shows."""
    return steady_times([one.step_s for one in seen], [one.reference_s for one in seen])


def is_close(values: Sequence[float]) -> bool:
    """Whether both bounds of the typical value, each with an error of 5 %, are within ``CLOSE`` of it."""
    found = difference([math.log(value) for value in values], 0.05)
    return max(found.high - found.estimate, found.estimate - found.low) <= CLOSE


def with_prediction(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Plan:
    """The plan with the simulator's prediction."""
    bare = evolve(plan, prediction=None)
    return evolve(bare, prediction=Prediction(costs, cluster, **asdict(simulated(bare, costs, cluster))))


def run_case(name: str, schedules: Sequence[str], steps: int, folder: str | None, team: RankTeam, wire: Any) -> None:
    """Cut by cut: profile, predict, freeze, measure; rank 0 reports."""
    case = Case(name, team)
    for cut in dict.fromkeys(SCHEDULES[schedule] for schedule in schedules):
        profile = case.profile(cut)
        plans = case.predicted([schedule for schedule in schedules if SCHEDULES[schedule] == cut], profile)
        hashes = {schedule: hashlib.sha256(plan_json(plan).encode()).hexdigest() for schedule, plan in plans.items()}
        if wire is not None:
            wire.send({s: (name, hashes[s], plan.prediction.step_s) for s, plan in plans.items()})
        rows, before = list[Row](), profile.steps_s
        for schedule, plan in plans.items():
            row = run_plan(case, schedule, plan, hashes[schedule], profile.reference_s, steps, folder)
            after = tuple(steady(case.rehearsed(profile.plan)[1]))
            rows.append(evolve(row, rehearsed_drift=profile.drift((*before, *after))))
            before = after
        if wire is not None:
            wire.send(rows)


def run_plan(
    case: Case, schedule: str, plan: Plan, digest: str, profiled_s: float, steps: int, folder: str | None
) -> Row:
    """Measure a frozen plan; the drift of rehearsed steps is still to be measured.

    Args:
        case: its model.
        schedule: its schedule.
        plan: with its prediction.
        digest: what it was frozen as.
        profiled_s: the reading of the reference workload for which the prediction holds.
        steps: the largest number of timed steps.
        folder: where its traces are written, if anywhere.
    """
    name, team, pipe = case.name, case.team, case.ready(plan)
    load = ProcessorTimes(team)
    times = case.measured(pipe, steps)
    foreign = load.foreign()
    processor = team.everywhere(lambda _: times.own)
    _, trace = pipe.trace_step(case.batch)
    del pipe
    freed()
    result = simulate(plan)
    if folder is not None and team.first:
        write_traces(Path(folder), f"{name}-{schedule}", result.trace, trace)
    peaks = peak_memory(trace, ["saved"])
    busy = [sum(ends) - sum(starts) for starts, ends in result.operation_times]
    return Row(
        name, schedule, digest, plan.prediction.step_s, times.wall, times.first, plan.prediction.peak_saved_bytes,
        tuple(peak["saved"] for peak in peaks), tuple(busy), tuple(processor), foreign,
        tuple(speed / profiled_s for speed in times.references_s), 1.0,
    )  # fmt: skip


def freed() -> None:
    """Return what an ended pipeline held to the operating system."""
    gc.collect()
    give_back_freed_memory()


def write_traces(folder: Path, name: str, predicted: Any, measured: Any) -> None:
    """Two files for ``panpipe compare``."""
    from panpipe.core.trace.perfetto import write_trace

    folder.mkdir(parents=True, exist_ok=True)
    write_trace(predicted, folder / f"{name}-predicted.json")
    write_trace(measured, folder / f"{name}-measured.json")


def worker(
    rank: int, models: Sequence[str], schedules: Sequence[str], steps: int, folder: str | None, wire: Any
) -> None:
    """One of the two processes."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    team = RankTeam()
    keep_freed_memory()
    for name in models:
        run_case(name, schedules, steps, folder, team, wire if rank == 0 else None)
    if rank == 0:
        wire.send(None)
    # Without destroying the group: the worker has sent its results.
    dist.barrier()
    os._exit(0)


def percent(value: float) -> str:
    """With sign."""
    return f"{100 * value:+.1f} %"


def megabytes(sizes: Sequence[float]) -> str:
    """By device."""
    return "/".join(f"{size / 1e6:.1f}" for size in sizes)


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    low, _, high = statistics.quantiles(row.steps_s, n=4)
    return (
        row.model, row.schedule, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", f"{low:.3f}–{high:.3f}",
        percent(row.error), percent(row.drift), percent(row.corrected_by_reference), percent(row.rehearsed_drift - 1),
        percent(row.corrected), megabytes(row.predicted_saved),
        megabytes(row.measured_saved), percent(row.saved_error),
        percent(row.busy_error), row.frozen[:12],
    )  # fmt: skip


def facts(row: Row) -> dict[str, Any]:
    """The same for programs."""
    return {
        "model": row.model, "schedule": row.schedule, "predicted_s": round(row.predicted_s, 4),
        "measured_s": round(row.measured_s, 4), "error": round(row.error, 4), "drift": round(row.drift, 4),
        "corrected_by_reference": round(row.corrected_by_reference, 4),
        "rehearsed_drift": round(row.rehearsed_drift - 1, 4), "corrected_error": round(row.corrected, 4),
        "error_of_the_first_steps": round(row.first_error, 4),
        "predicted_saved_bytes": row.predicted_saved, "measured_saved_bytes": row.measured_saved,
        "saved_error": round(row.saved_error, 4), "busy_error": round(row.busy_error, 4),
        "foreign_share": round(row.foreign, 3), "frozen": row.frozen,
    }  # fmt: skip


HEADER = (
    "model", "schedule", "predicted s", "measured s", "quartiles", "error",
    "drift of the reference workload", "corrected by it", "drift of the profiled step", "corrected by it",
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
        f"drift from profile to measurement: of the profiled step {extremes([r.rehearsed_drift - 1 for r in rows])}, "
        f"of the reference workload {extremes([row.drift for row in rows])}",
        f"saved tensors: worst error of the peak {percent(saved.saved_error)} in {saved.model} {saved.schedule} "
        f"(bound {100 * SAVED:.0f} %)",
        f"the {WARM_UP} steps that warm up: median error "
        f"{100 * statistics.median(abs(row.first_error) for row in rows):.1f} %, bias "
        f"{percent(statistics.median(row.first_error for row in rows))}, worst "
        f"{percent(max((row.first_error for row in rows), key=abs))} (reported separately, without a bound)",
        "busy time against processor time: median "
        f"{100 * statistics.median(abs(row.busy_error) for row in rows):.1f} % on the device where it is worse",
        f"other processes took {100 * max(row.foreign for row in rows):.0f} % of the machine while a model was "
        "measured, at most",
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
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (models, schedules, arguments.steps, arguments.traces, theirs)
    processes = [context.Process(target=worker, args=(rank, *given), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    rows: list[Row] = []
    start = time.perf_counter()
    while (answered := answer(ours, processes)) is not None:
        if isinstance(answered, dict):
            for schedule, (model, digest, step_s) in answered.items():
                print(f"frozen: {model} {schedule} {step_s:.4f} s {digest}", file=sys.stderr, flush=True)
            continue
        rows += answered
        for row in answered:
            print(json.dumps(facts(row)), flush=True)
    lines, kept = summary(rows)
    counts = [len(row.steps_s) for row in rows]
    lines.append(f"{time.perf_counter() - start:.0f} s in all, {min(counts)} to {max(counts)} steps of each plan")
    print("\n".join(lines))
    if arguments.record:
        title = "Predicted against measured, two gloo workers"
        record(arguments.record, title, machine(), HEADER, [cells(row) for row in rows])
        with Path(arguments.record).open("a", encoding="utf-8") as file:
            file.write("\n".join(f"- {line}" for line in lines) + "\n\n")
    sys.exit(0 if kept else 1)


def answer(wire: Any, processes: Sequence[Any]) -> Any:
    """The next message of the workers."""
    while not wire.poll(1):
        dead = next((p for p in processes if not p.is_alive() and p.exitcode != 0), None)
        if dead is not None:
            raise SystemExit(f"a worker has stopped with {dead.exitcode}")
    return wire.recv()


if __name__ == "__main__":
    main()
