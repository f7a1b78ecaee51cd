"""The two pairs of workers of `prediction`: one profiles and predicts, the other trains.

Both live for the whole run, over gloo, two workers of one thread each; only one pair computes at a time. What one pair
holds in memory does not change the steps of the other: pipelines of one process that take turns have steps up to 14 %
longer.
"""

import gc
import hashlib
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.costs import StageCosts, stage_edges
from panpipe.core.costs.partition import device_limits
from panpipe.core.paired_difference import robust_geometric_mean
from panpipe.core.plan.plan import Plan, Prediction, parse_plan, plan_json
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.options import options, schedule_problem
from panpipe.core.trace.figures import peak_memory
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.trace import Trace
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.batch.microbatches import split_batch
from panpipe.runtimes.devices.heap import give_back_freed_memory, keep_freed_memory
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.planning.automatic import PLAIN, Planning
from panpipe.runtimes.planning.measurements import Stages
from panpipe.runtimes.planning.options import PlanningOptions
from panpipe.runtimes.planning.rehearsed import Rehearsal, length_ratio, rehearsed_profile, times_scaled
from panpipe.runtimes.profile.measured_cluster import measured_cluster
from panpipe.runtimes.profile.reference_workload import reference_s
from panpipe.runtimes.programs.options import ProgramOptions
from panpipe.runtimes.rehearsal import TYPICAL
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate
from prediction_models import MICROBATCHES, MODELS

from benchmarks.worker_process import rank_environment
from tests.support.early_gradients import early_gradients

PORTS = {"profiling": 29690, "training": 29692}
SCHEDULES = {"gpipe": "1f1b", "1f1b": "1f1b", "zb-h1": "1f1b", "interleaved-1f1b": "interleaved-1f1b", "zb-v": "v-half"}
"""Schedules, and for each the one that cuts are searched for and whose placement is rehearsed."""
CHUNKS = {"1f1b": 1, "interleaved-1f1b": 2, "v-half": 2}
"""Stages a device of what is rehearsed."""
REHEARSED = 8
"""Rehearsed steps of each cut before its predictions."""
WARM_UP = 3
"""Steps of each plan, and of each rehearsal, before those that count."""


@frozen
class Request:
    """What is measured.

    Args:
        models, schedules: each model with each schedule.
        steps: timed steps of each plan.
        folder: where predicted and measured traces are written, if anywhere.
    """

    models: tuple[str, ...]
    schedules: tuple[str, ...]
    steps: int
    folder: str | None

    def cuts(self) -> Iterator[tuple[str, str, list[str]]]:
        """Model, cut and the schedules of the cut, in the order in which they are measured."""
        for model in self.models:
            for cut in dict.fromkeys(SCHEDULES[schedule] for schedule in self.schedules):
                yield model, cut, [schedule for schedule in self.schedules if SCHEDULES[schedule] == cut]


@frozen
class Frozen:
    """The predicted plans of a cut, none of which has run.

    Args:
        model: which.
        plans: by schedule, with their predictions, as JSON.
    """

    model: str
    plans: dict[str, str]

    def digest(self, schedule: str) -> str:
        """SHA-256 of a plan."""
        return hashlib.sha256(self.plans[schedule].encode()).hexdigest()


@frozen
class Rehearsed:
    """The profiled steps that took turns with the measured ones of a plan.

    Args:
        drifts: of each: how many times as long it took as when its cut was profiled.
        readings: of each: how many times as long the reference workload took around it.
    """

    drifts: tuple[float, ...]
    readings: tuple[float, ...]


@frozen
class Measured:
    """The measured steps of a plan.

    Args:
        steps_s, first_s: of each step that counts, and that warms up.
        predicted_busy_s, processor_s: by device; the second is the median over steps.
        predicted_saved, measured_saved: peak of saved tensors by device, in bytes.
        foreign: what other processes took of all processors meanwhile, as a share of their time.
    """

    steps_s: tuple[float, ...]
    first_s: tuple[float, ...]
    predicted_busy_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    predicted_saved: tuple[float, ...]
    measured_saved: tuple[float, ...]
    foreign: float


class Case:
    """One model on a pair of workers.

    Args:
        name: of the model.
        team: the workers.
    """

    def __init__(self, name: str, team: RankTeam) -> None:
        self.name, self.team = name, team
        self.programs = ProgramOptions()
        torch.manual_seed(0)
        self.model, self.step, self.batch = MODELS[name]()
        self.piece = split_batch(self.batch, MICROBATCHES)[0]
        self.operators = operators_of(capture_step(self.model, self.step, self.piece.batch))

    def ready(self, plan: Plan) -> Pipeline:
        """The pipeline of a plan, with a new model."""
        torch.manual_seed(0)
        model = MODELS[self.name]()[0]
        example = Example(model, self.step, self.piece, self.operators)
        return Pipeline(example, plan, self.team, Training(optimizer=torch.optim.AdamW), self.programs)


class Profiled:
    """A profiled model.

    Args:
        case: the model.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.team = case, case.team
        wanted = PlanningOptions(oracle=simulated, cut_oracle=longest_path, schedule=PLAIN)
        example = Example(case.model, case.step, case.piece, case.operators)
        self.planning = Planning(example, MICROBATCHES, self.team, wanted, torch.optim.AdamW)
        case.programs = self.planning.programs
        self.cluster = measured_cluster(self.team, torch.device("cpu"))
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

    def rehearsal(self, cut: str) -> tuple[Plan, tuple[StageCosts, ...]]:
        """The plan that is rehearsed for a cut, and its costs from single programs."""
        stages = self.planning.cuts(self.cluster).search(self.graph, CHUNKS[cut], [find_family(cut)])
        assert stages is not None
        known = self.planning.measured.costs_of(stages)
        plan = self.plan(cut, stages, known)
        orders = early_gradients(plan.device_actions, plan.placement, MICROBATCHES // 2)
        return evolve(plan, schedule="rehearsal", device_actions=orders), tuple(known)


class RehearsedCut:
    """A cut of a model whose step is rehearsed: for its profile at first, for the drift of the machine later.

    Args:
        profiled: the model.
        cut: name of what is rehearsed.
    """

    def __init__(self, profiled: Profiled, cut: str) -> None:
        self._profiled, self._batch = profiled, profiled.case.batch
        plan, known = profiled.rehearsal(cut)
        self._pipe = profiled.case.ready(plan)
        self._pipe.rehearse(self._batch, 0, WARM_UP)
        seen = [self._again() for _ in range(REHEARSED)]
        plan = self._pipe.plan
        steps_s, readings_s = [one.step_s for one in seen], [one.reference_s for one in seen]
        self._step_s, self._reading_s = robust_geometric_mean(steps_s), robust_geometric_mean(readings_s)
        self._stages = tuple(stage.nodes for stage in plan.stages)
        self._profile = rehearsed_profile([(plan, known, seen)], TYPICAL)
        self._ratio = length_ratio(plan, self._profile.of(plan), steps_s, simulated)

    def predicted(self, schedules: Sequence[str]) -> Frozen:
        """The plans of schedules with their predictions."""
        found = {}
        for name in schedules:
            plan = self._profiled.plan(name, self._stages, self._profile.costs[self._stages])
            costs = times_scaled(self._profile.of(plan), self._ratio)
            found[name] = plan_json(with_prediction(plan, costs, self._profiled.cluster))
        return Frozen(self._profiled.case.name, found)

    def rehearsed(self, steps: int, turns: Barrier) -> Rehearsed:
        """As many steps, each after one of the other pair."""
        seen = []
        for _ in range(steps):
            turns.wait()  # the other pair
            turns.wait()
            seen.append(self._again())
        turns.wait()
        return Rehearsed(
            tuple(one.step_s / self._step_s for one in seen), tuple(one.reference_s / self._reading_s for one in seen)
        )

    def _again(self) -> Rehearsal:
        """One step that changes nothing, always by a call of its own: what a call allocates, it frees."""
        return self._pipe.rehearse(self._batch, 1)[0]


def trained(case: Case, plan: Plan, steps: int, turns: Barrier, written: Path | None) -> Measured:
    """Measure a plan. Its pipeline is the only one in the process, and each step is followed by one of the other pair.

    Args:
        case: its model.
        plan: with its prediction.
        steps: the number of timed steps.
        turns: of the two pairs.
        written: where its traces are written, if anywhere.
    """
    team, pipe = case.team, case.ready(plan)
    first = [_step(case, pipe)[0] for _ in range(WARM_UP)]
    load, found = ProcessorTimes(team), []
    for _ in range(steps):
        turns.wait()
        reference_s(team)  # the rehearsed step runs after a reading, too
        load.start()
        found.append(_step(case, pipe))
        load.stop()
        turns.wait()  # the other pair
    turns.wait()
    wall, own = zip(*found, strict=True)
    processor = team.everywhere(lambda _: statistics.median(own))
    _, trace = pipe.trace_step(case.batch)
    del pipe
    free_memory()
    result = simulate(plan)
    if written is not None and team.first:
        write_traces(written, result.trace, trace)
    busy = tuple(sum(ends) - sum(starts) for starts, ends in result.operation_times)
    saved = tuple(peak["saved"] for peak in peak_memory(trace, ["saved"]))
    assert plan.prediction is not None
    return Measured(
        wall, tuple(first), busy, tuple(processor), tuple(plan.prediction.peak_saved_bytes), saved, load.foreign
    )


def _step(case: Case, pipe: Pipeline) -> tuple[float, float]:
    """Seconds of a step, and the processor's seconds of this worker's thread in it."""
    dist.barrier()
    start, before = time.perf_counter(), time.thread_time()
    pipe.step(case.batch)
    own = time.thread_time() - before
    dist.barrier()
    return time.perf_counter() - start, own


class ProcessorTimes:
    """What the whole machine and this pair's workers have computed between starts and stops.

    Args:
        team: the workers.
    """

    def __init__(self, team: RankTeam) -> None:
        self._team = team
        self._since = self._sums = (0.0, 0.0, 0.0)

    def start(self) -> None:
        """Count from now on."""
        self._since = self._now()

    def stop(self) -> None:
        """Stop counting."""
        spans = zip(self._sums, self._now(), self._since, strict=True)
        everything, busy, own = (total + now - then for total, now, then in spans)
        self._sums = everything, busy, own

    @property
    def foreign(self) -> float:
        """The share of all processors that others took."""
        everything, busy, own = self._sums
        return max(0.0, (busy - own) / everything)

    def _now(self) -> tuple[float, float, float]:
        """All processors' seconds, those not idle, and those of the workers."""
        fields = [int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        own = sum(self._team.everywhere(lambda _: time.process_time()))
        return sum(fields) / tick, (sum(fields) - fields[3] - fields[4]) / tick, own


def with_prediction(plan: Plan, costs: tuple[StageCosts, ...], cluster: Cluster) -> Plan:
    """The plan with the simulator's prediction."""
    bare = evolve(plan, prediction=None)
    return evolve(bare, prediction=Prediction(costs, cluster, **asdict(simulated(bare, costs, cluster))))


def free_memory() -> None:
    """Return what an ended pipeline held to the operating system."""
    gc.collect()
    give_back_freed_memory()


def write_traces(start: Path, predicted: Trace, measured: Trace) -> None:
    """Two files for ``panpipe compare``."""
    start.parent.mkdir(parents=True, exist_ok=True)
    write_trace(predicted, start.with_name(f"{start.name}-predicted.json"))
    write_trace(measured, start.with_name(f"{start.name}-measured.json"))


def profiling(rank: int, request: Request, turns: Barrier, wire: Any) -> None:
    """A worker of the pair that profiles. For each cut it sends `Frozen`, and for each plan `Rehearsed`."""
    team, last = _join(rank, "profiling"), ""
    profiled: Profiled
    for model, cut, schedules in request.cuts():
        if model != last:
            profiled, last = Profiled(Case(model, team)), model
        rehearsed = RehearsedCut(profiled, cut)
        plans = rehearsed.predicted(schedules)
        if rank == 0:
            wire.send(plans)
        for _ in schedules:
            drift = rehearsed.rehearsed(request.steps, turns)
            if rank == 0:
                wire.send(drift)
            turns.wait()  # the other pair has ended its plan
        del rehearsed
        free_memory()
    _exit()


def training(rank: int, request: Request, turns: Barrier, wire: Any) -> None:
    """A worker of the pair that trains. For each cut it receives `Frozen`; for each plan it sends `Measured`."""
    team, last = _join(rank, "training"), ""
    case: Case
    for model, _, schedules in request.cuts():
        plans: Frozen = wire.recv()
        if model != last:
            case, last = Case(model, team), model
        for schedule in schedules:
            written = None if request.folder is None else Path(request.folder) / f"{model}-{schedule}"
            plan = parse_plan(plans.plans[schedule], schedule)
            measured = trained(case, plan, request.steps, turns, written)
            if rank == 0:
                wire.send(measured)
            turns.wait()
    _exit()


def _join(rank: int, pair: str) -> RankTeam:
    """Create the pair's process group, and its team."""
    os.environ.update(rank_environment(rank, PORTS[pair]))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    keep_freed_memory()
    return RankTeam()


def _exit() -> None:
    """End without destroying the group: the worker has sent its results."""
    dist.barrier()
    os._exit(0)
