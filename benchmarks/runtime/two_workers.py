"""Two gloo workers of one thread each on the benchmark GPT: panpipe against ``torch.distributed.pipelining``.

All contenders stay alive and take turns of a few steps, so that a machine whose speed drifts is as fast for one as for
the next; a ratio is the median over rounds of ratios within a round. Steps are timed from barrier to barrier, gradients
only (no optimizer), as the peer's own schedules do it. Every worker of every contender is pinned to a separate core:
otherwise the scheduler sometimes runs two of them on one core for some milliseconds. Memory is resident memory: the
peak while training above the level right before the first step (the kernel's high-water mark is reset there).

    python benchmarks/runtime/two_workers.py [--rounds 15] [--steps 2] [--peers 1F1B,ZBVZeroBubble] [--record FILE]
"""

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from panpipe.benchmarks import gpt
from panpipe.benchmarks.driver import Workers, argument_parser, report, reset_resident_peak, resident_bytes, seconds

MIB = 1 << 20
WARM_UP = 2
"""Steps that are not timed, after the level of memory is taken."""
Step = Callable[[], object]


def one_process() -> tuple[Step, dict[str, Any]]:
    model, batch = gpt.make(), gpt.data()
    return lambda: gpt.accumulate(model, batch, gpt.MICROBATCHES), {}


def plan_of(rank: int, schedule: str, file: Path) -> Callable[[str], None]:
    """Write an automatic plan, after its contest."""
    import panpipe as pp

    pipe = pp.pipeline(
        gpt.make(), gpt.step, gpt.data(), optimizer=torch.optim.SGD, microbatches=gpt.MICROBATCHES,
        plan=pp.Auto(schedule=schedule, cache=False), run=pp.Run(progress=False),
    )  # fmt: skip
    while pipe.contest is not None and not pipe.contest.done:
        pipe.step(gpt.data())
    if rank == 0:
        pipe.plan.save(file)
        print(repr(pipe.contest or "no contest"), flush=True)
    return lambda asked: None


def panpipe(file: Path) -> tuple[Step, dict[str, Any]]:
    import panpipe as pp

    pipe = pp.pipeline(
        gpt.make(), gpt.step, gpt.data(), optimizer=None, microbatches=gpt.MICROBATCHES, plan=file,
        run=pp.Run(progress=False),
    )  # fmt: skip
    return lambda: pipe.step(gpt.data()), {"name": pipe.plan.schedule, "predicted_s": pipe.plan.prediction.step_s}


def peer(rank: int, schedule: str) -> tuple[Step, dict[str, Any]]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    family = get_schedule_class(schedule)
    single = issubclass(family, PipelineScheduleSingle)
    count = 2 if single else 4
    folded = schedule in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank] if single else [rank, 3 - rank] if folded else [rank, rank + 2]
    each = gpt.LAYERS // count
    stages = [PipelineStage(gpt.GPT(i * each, (i + 1) * each), i, count, torch.device("cpu")) for i in mine]
    runner = family(stages[0] if single else stages, n_microbatches=gpt.MICROBATCHES, loss_fn=gpt.loss_of)
    x, y = gpt.data()

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
        inputs = (x,) if 0 in mine else ()
        target = {"target": y, "losses": []} if count - 1 in mine else {}
        runner.step(*inputs, **target, return_outputs=False)

    return step, {}


def contender(rank: int, job: str, name: str, file: Path) -> Callable[[int], Any]:
    """What a process answers: times of as many steps as are asked for, or facts where none are."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    step, facts = one_process() if job == "one process" else panpipe(file) if job == "panpipe" else peer(rank, name)
    meet = None if job == "one process" else dist.barrier
    reset_resident_peak()
    before = resident_bytes("VmRSS")
    for _ in range(WARM_UP):
        step()

    def answer(steps: int) -> Any:
        return seconds(step, steps, meet) if steps else {**facts, "above": resident_bytes("VmHWM") - before}

    return answer


def main() -> None:
    arguments = argument_parser(
        __doc__, rounds=15, steps=(2, "of each contender in a round"), schedules=("1f1b,auto", "panpipe's"),
        peers=("1F1B,ZBVZeroBubble", "torch.distributed.pipelining's"),
    ).parse_args()  # fmt: skip
    jobs = [("one process", "eager")]
    jobs += [("panpipe", name) for name in arguments.schedules.split(",") if name]
    jobs += [("torch", name) for name in arguments.peers.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        files = {job: Path(folder, f"{job[1]}.json") for job in jobs}
        # Plans are made in advance, so that memory left by their measurements does not count as training.
        for kind, name in jobs:
            if kind == "panpipe":
                Workers(2, plan_of, name, files[kind, name]).close()
        workers = {job: Workers(1 if job == jobs[0] else 2, contender, *job, files[job]) for job in jobs}
        turns: dict[tuple[str, str], list[list[float]]] = {job: [] for job in jobs}
        for number in range(arguments.rounds):
            for job in jobs[number % len(jobs) :] + jobs[: number % len(jobs)]:
                turns[job].append(workers[job].ask(arguments.steps)[0])
    medians = {job: [statistics.median(turn) for turn in found] for job, found in turns.items()}
    step_s = {job: statistics.median(found) for job, found in medians.items()}
    fastest_s = {job: min(map(min, found)) for job, found in turns.items()}
    reference = next((job for job in jobs if job[0] == "torch"), jobs[0])
    rows = []
    for job in jobs:
        facts = workers[job].ask(0)
        workers[job].close()
        name, predicted_s = facts[0].get("name", job[1]), facts[0].get("predicted_s")
        faster = [
            statistics.median(theirs / ours for theirs, ours in zip(medians[other], medians[job], strict=True))
            for other in (jobs[0], reference)
        ]
        print(json.dumps({"runner": job[0], "schedule": name, "step_s": step_s[job]}), flush=True)
        rows.append((
            f"{job[0]}: {name}", f"{step_s[job]:.3f}", f"{fastest_s[job]:.3f}",
            f"{predicted_s:.3f}" if predicted_s else "–", *(f"{ratio:.3f}" for ratio in faster),
            "/".join(f"{fact['above'] / MIB:.0f}" for fact in facts),
        ))  # fmt: skip
    for ours in jobs:
        for by, found in {"fastest step": fastest_s, "median": step_s}.items():
            theirs = [found[other] for other in jobs if other[0] == "torch"]
            if ours[0] == "panpipe" and theirs:
                print(f"panpipe: {ours[1]} over the best of torch by the {by}: {min(theirs) / found[ours] - 1:+.1%}")
    header = (
        "runner", "step s", "fastest s", "predicted s", "speed-up over one process", f"over {' '.join(reference)}",
        "peak resident MB above the start, rank 0/1",
    )  # fmt: skip
    report(arguments.record, "Two gloo workers, benchmark GPT", header, rows)


if __name__ == "__main__":
    main()
