"""Plans the demo repeatedly: is it the same plan, how long does it take, and is the step within the interval?

Each run is a new pair of gloo workers of one thread each, as ``torchrun`` starts them. A run plans the demo's GPT-2 and
trains some steps by that plan, in turns with its rehearsed step and with the reference workload: both measure how much
slower the machine is than while planning. Counted over the runs:

- how often each plan was chosen: the same schedule, stages and orders are the same plan;
- how long planning took, without the capture;
- whether the typical step is within the plan's 90 % interval: corrected by the rehearsed step, which the interval is
  for, corrected by the reference workload, and as it is; the width of the interval, and the error of the prediction.

With ``--load N``, N other processes compute all the time. Then the chosen plan takes turns with 1F1B on its own stages,
planned in the same run: is it more than 2 % slower?

    python benchmarks/planning/planning_repeats.py [--runs 10] [--steps 16] [--load 0] [--record FILE]
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import panpipe
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_gpt2 as demo
from attrs import asdict, frozen
from panpipe.core.drift import paired_times, steady_times
from panpipe.core.paired_difference import difference, robust_geometric_mean

from benchmarks.recording import machine, record
from benchmarks.worker_process import rank_environment

PORT = 29730
CAPTURE = "capturing the step"
"""The phase that is not part of planning."""
WARM_UP = 2
"""Steps that are not timed."""
SAME, HITS, HALF_WIDTH, SLOWER = 0.9, 0.9, 0.05, 0.02
"""Bounds: the least share of runs with one plan, and of medians in their interval; the widest half of an interval; and
how much slower than 1F1B a plan may be on a loaded machine."""


@frozen
class Run:
    """One run.

    Args:
        plan: identity of the plan chosen.
        schedule: its schedule and number of stages.
        capture_s, planning_s: seconds until planning began, and from then on.
        predicted_s, interval_s: the step as predicted.
        measured_s: median of the steps.
        steady_s: the typical step at the speed of the profile, by the rehearsed step.
        by_reference_s: the same by the reference workload.
        drift: how much longer the rehearsed step took than while it was profiled, as a share.
        against_plain: the plan's step ÷ that of 1F1B − 1, paired: estimate, low, high; None where they are one plan, or
            were not compared.
    """

    plan: str
    schedule: str
    capture_s: float
    planning_s: float
    predicted_s: float
    interval_s: tuple[float, float]
    measured_s: float
    steady_s: float
    by_reference_s: float
    drift: float
    against_plain: tuple[float, float, float] | None = None

    @property
    def half_width(self) -> float:
        """Of the interval, as a share of the predicted step."""
        return (self.interval_s[1] - self.interval_s[0]) / (2 * self.predicted_s)

    def hit(self, step_s: float) -> bool:
        """Whether a step is within the interval."""
        low, high = self.interval_s
        return low <= step_s <= high


def make(plan: Any, batch: Any, **choices: Any) -> Any:
    """A pipeline of the demo's model."""
    optimizer = functools.partial(torch.optim.AdamW, lr=5e-4)
    return panpipe.pipeline(
        demo.make_model(), demo.step, batch, optimizer=optimizer, microbatches=demo.MICROBATCHES, plan=plan, **choices
    )  # fmt: skip


def timed(pipe: Any, batch: Any) -> float:
    """Seconds of a step, from barrier to barrier."""
    dist.barrier()
    start = time.perf_counter()
    pipe.step(batch)
    dist.barrier()
    return time.perf_counter() - start


def worker(rank: int, port: int, steps: int, against_plain: bool, cache: str, wire: Any) -> None:
    """One of the two processes of a run; rank 0 sends the result."""
    os.environ.update(rank_environment(rank, port), PANPIPE_CACHE=cache)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    data = demo.batches(demo.standard_library_text(), 1)[0]
    start, marks = time.perf_counter(), dict[str, float]()  # phase → when it began
    pipe = make("auto", data, progress=lambda phase, *_: marks.setdefault(phase, time.perf_counter()))
    ready = time.perf_counter()
    captured = next((at for phase, at in marks.items() if phase != CAPTURE), ready)  # rank 0 reports
    plan, prediction = pipe.plan, pipe.plan.prediction
    for _ in range(WARM_UP):
        timed(pipe, data)
    times, rehearsed, speeds = [], [], [pipe.reference_s()]
    for _ in range(steps):
        times.append(timed(pipe, data))
        rehearsed.append(pipe.rehearsed_s(data))
        speeds.append(pipe.reference_s())
    around = [statistics.fmean(pair) for pair in itertools.pairwise(speeds)]
    # On a loaded machine there may be no time to rehearse: then the plan has no interval and no readings.
    then_s = prediction.rehearsed_s or robust_geometric_mean(rehearsed)
    steady = paired_times(times, rehearsed, then_s)
    by_reference = steady_times(times, around, prediction.reference_s)
    ratio = compared(pipe, data, steps) if against_plain and plan.schedule != "1f1b" else None
    if rank == 0:
        wire.send(
            Run(plan.hash, f"{plan.schedule}, {len(plan.stages)} stages", captured - start, ready - captured,
                prediction.step_s, prediction.interval_s or (prediction.step_s,) * 2, statistics.median(times),
                robust_geometric_mean(steady), robust_geometric_mean(by_reference),
                robust_geometric_mean(rehearsed) / then_s - 1, ratio)
        )  # fmt: skip
    # The group need not be destroyed: what a worker had to send is sent.
    dist.barrier()
    os._exit(0)


def compared(pipe: Any, batch: Any, steps: int) -> tuple[float, float, float]:
    """The pipeline's step ÷ that of 1F1B − 1, in turns of one step: estimate, and bounds with an error of 5 % each."""
    plain = make("auto", batch, schedule="1f1b", progress=False)
    for _ in range(WARM_UP):
        timed(plain, batch)
    turns = []
    for number in range(steps):
        first, second = (pipe, plain) if number % 2 else (plain, pipe)
        found = {id(first): timed(first, batch)}
        found[id(second)] = timed(second, batch)
        turns.append(math.log(found[id(pipe)] / found[id(plain)]))
    found = difference(turns, 0.05)
    return tuple(math.expm1(value) for value in (found.estimate, found.low, found.high))


def busy() -> None:
    """Compute until the process is ended."""
    torch.set_num_threads(1)
    matrix = torch.full((512, 512), 1 / 512)
    while True:
        torch.mm(matrix, matrix)


def run(number: int, steps: int, against_plain: bool) -> Run:
    """One run, in new processes."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as cache:  # every run plans again
        given = (PORT + number % 20, steps, against_plain, cache, theirs)
        processes = [context.Process(target=worker, args=(rank, *given), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        while not ours.poll(1):
            dead = next((p for p in processes if not p.is_alive() and p.exitcode != 0), None)
            if dead is not None:
                raise SystemExit(f"a worker has stopped with {dead.exitcode}")
        found: Run = ours.recv()
        for process in processes:
            process.join()
    return found


def percent(value: float) -> str:
    """With sign."""
    return f"{100 * value:+.1f} %"


def facts(each: Run) -> dict[str, Any]:
    """One run, for programs."""
    return {
        **asdict(each), "half_width": each.half_width, "error": each.predicted_s / each.measured_s - 1,
        "corrected_error": each.predicted_s / each.steady_s - 1, "hit": each.hit(each.steady_s),
        "corrected_by_reference": each.predicted_s / each.by_reference_s - 1,
        "hit_by_reference": each.hit(each.by_reference_s), "raw_hit": each.hit(each.measured_s),
    }  # fmt: skip


HEADER = (
    "run", "plan", "as", "planning s, capture apart", "predicted s", "90 % interval", "half-width", "measured s",
    "error", "drift of the rehearsed step", "corrected by it", "in the interval",
    "corrected by the reference workload", "in the interval", "against 1f1b",
)  # fmt: skip


def cells(number: int, each: Run) -> tuple[str, ...]:
    """One run, for people."""
    found, plain = facts(each), each.against_plain
    return (
        str(number), each.schedule, each.plan[:8], f"{each.planning_s:.1f}", f"{each.predicted_s:.3f}",
        f"{each.interval_s[0]:.3f}–{each.interval_s[1]:.3f}", f"±{100 * each.half_width:.1f} %",
        f"{each.measured_s:.3f}", percent(found["error"]), percent(each.drift), percent(found["corrected_error"]),
        "yes" if found["hit"] else "no", percent(found["corrected_by_reference"]),
        "yes" if found["hit_by_reference"] else "no",
        "–" if plain is None else f"{percent(plain[0])} ({percent(plain[1])} to {percent(plain[2])})",
    )  # fmt: skip


def summary(runs: Sequence[Run], load: int) -> tuple[list[str], bool]:
    """Lines for people, and whether every bound is kept."""
    (_, most), *_ = plans = Counter(each.plan for each in runs).most_common()
    all_facts = [facts(each) for each in runs]
    hits, others, raw = (sum(one[name] for one in all_facts) for name in ("hit", "hit_by_reference", "raw_hit"))
    widths = sorted(each.half_width for each in runs)
    seconds = sorted(each.planning_s for each in runs)
    errors, others_s = ([abs(one[name]) for one in all_facts] for name in ("corrected_error", "corrected_by_reference"))
    # Where the plan is 1F1B it is not slower than 1F1B.
    slower = max((each.against_plain[0] if each.against_plain else 0.0 for each in runs), default=0.0)
    lines = [
        f"{most} of {len(runs)} runs chose one plan, of {len(plans)} in all (bound {SAME:.0%})",
        f"{hits} of {len(runs)} typical steps in the interval, corrected by the rehearsed step (bound {HITS:.0%}), "
        f"{others} corrected by the reference workload, {raw} as they are",
        f"half-width of the interval: median {statistics.median(widths):.1%}, from {widths[0]:.1%} to {widths[-1]:.1%} "
        f"(bound {HALF_WIDTH:.0%})",
        f"error corrected by the rehearsed step: median {statistics.median(errors):.1%}, worst {max(errors):.1%}; by "
        f"the reference workload {statistics.median(others_s):.1%} and {max(others_s):.1%}",
        f"planning, the capture apart: median {statistics.median(seconds):.1f} s, from {seconds[0]:.1f} to "
        f"{seconds[-1]:.1f} s",
    ]
    if load:
        lines.append(
            f"{load} processes computed all the time: the plan chosen was {percent(slower)} slower than 1F1B at most "
            f"(bound {percent(SLOWER)}); the bounds above are for a quiet machine"
        )
        return lines, slower <= SLOWER
    share = len(runs)
    return lines, most >= SAME * share and hits >= HITS * share and statistics.median(widths) <= HALF_WIDTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of each run")
    parser.add_argument("--load", type=int, default=0, help="other processes that compute all the time")
    parser.add_argument("--record", help="append the result to this Markdown file")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.steps < 5:
        parser.error(f"{arguments.runs} runs of {arguments.steps} steps: give at least 1 run of 5 steps")
    start = time.perf_counter()
    runs: list[Run] = []
    with ExitStack() as load:
        for _ in range(arguments.load):
            process = mp.get_context("spawn").Process(target=busy, daemon=True)
            process.start()
            load.callback(process.kill)
        for number in range(arguments.runs):
            runs.append(run(number, arguments.steps, arguments.load > 0))
            print(json.dumps(facts(runs[-1])), flush=True)
    lines, kept = summary(runs, arguments.load)
    lines.append(f"{time.perf_counter() - start:.0f} s in all, {arguments.steps} steps of each run")
    print("\n".join(lines))
    if arguments.record:
        title = "Repeated plans of the demo" + (f", {arguments.load} busy processes" * bool(arguments.load))
        record(
            arguments.record, title, machine(), HEADER, [cells(i, each) for i, each in enumerate(runs, 1)]
        )  # fmt: skip
        with Path(arguments.record).open("a", encoding="utf-8") as file:
            file.write("\n".join(f"- {line}" for line in lines) + "\n\n")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
