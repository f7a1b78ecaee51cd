"""Two gloo workers of one thread each on the benchmark GPT: panpipe against ``torch.distributed.pipelining``.

All contenders stay alive and take turns of a few steps, so that a machine whose speed drifts is as fast for one as for
the next; a ratio is the median over rounds of ratios within a round. Steps are timed from barrier to barrier, gradients
only (no optimizer), as the peer's own schedules do it. Every worker of every contender is pinned to a separate core:
otherwise the scheduler sometimes runs two of them on one core for some milliseconds. Memory is resident memory: the
peak while training above the level right before the first step (the kernel's high-water mark is reset there).

    python benchmarks/runtime/two_workers.py [--rounds 15] [--steps 2] [--peers 1F1B,ZBVZeroBubble] [--record FILE]
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

from benchmarks import gpt
from benchmarks.driver import Workers, argument_parser, report, reset_resident_peak, resident_bytes

MIB = 1 << 20
WARM_UP = 2
"""Steps that are not timed, after the level of memory is taken."""


class Runner:
    """What one process of a contender does on request.

    Args:
        step: runs one training step.
        meet: waits for the contender's other processes.
        facts: further facts to report.
    """

    def __init__(self, step: Callable[[], Any], meet: Callable[[], Any], **facts: Any) -> None:
        self._step, self._meet, self._facts = step, meet, facts
        reset_resident_peak()
        self._before_mb = resident_bytes("VmRSS") / MIB
        for _ in range(WARM_UP):
            step()

    def times(self, steps: int) -> list[float]:
        """Times of steps, in seconds."""
        found = []
        for _ in range(steps):
            self._meet()
            start = time.perf_counter()
            self._step()
            self._meet()
            found.append(time.perf_counter() - start)
        return found

    def facts(self) -> dict[str, Any]:
        """What is known now."""
        return {"above_mb": resident_bytes("VmHWM") / MIB - self._before_mb, **self._facts}


def one_process() -> Runner:
    model, (x, y) = gpt.make(), gpt.data()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for a, b in zip(x.chunk(gpt.MICROBATCHES), y.chunk(gpt.MICROBATCHES), strict=True):
            (gpt.step(model, (a, b)) / gpt.MICROBATCHES).backward()

    return Runner(step, lambda: None)


def panpipe(rank: int, schedule: str, plan: str) -> Runner:
    import panpipe as pp

    known = Path(plan)
    if not known.exists():  # all ranks look before one writes
        dist.barrier()
        choice = pp.pipeline(
            gpt.make(), gpt.step, gpt.data(), optimizer=torch.optim.SGD, microbatches=gpt.MICROBATCHES,
            plan=pp.Auto(schedule=schedule, cache=False), run=pp.Run(progress=False),
        )  # fmt: skip
        while choice.contest is not None and not choice.contest.done:
            choice.step(gpt.data())
        if rank == 0:
            known.write_text(pp.plan_json(choice.plan), encoding="utf-8")
            if choice.contest is not None:
                print(repr(choice.contest), flush=True)
        choice.close()
    else:
        dist.barrier()
    dist.barrier()
    pipe = pp.pipeline(
        gpt.make(),
        gpt.step,
        gpt.data(),
        optimizer=None,
        microbatches=gpt.MICROBATCHES,
        plan=known,
        run=pp.Run(progress=False),
    )
    facts = {"plan": pipe.plan.schedule, "predicted_s": pipe.plan.prediction.step_s}
    return Runner(lambda: pipe.step(gpt.data()), dist.barrier, **facts)


def peer(rank: int, schedule: str) -> Runner:
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

    return Runner(step, dist.barrier)


def runner(rank: int, job: str, name: str, plan: str) -> Callable[[int], Any]:
    """What a process of a contender answers: times of as many steps, or facts where none are asked for."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if job == "one process":
        found = one_process()
    else:
        found = panpipe(rank, name, plan) if job == "panpipe" else peer(rank, name)
    return lambda steps: found.times(steps) if steps else found.facts()


class Contender:
    """The processes of one runner, waiting for their turn."""

    def __init__(self, job: str, name: str, plan: str) -> None:
        self.job, self.name, self.fastest_s = job, name, math.inf
        self._workers = Workers(1 if job == "one process" else 2, runner, job, name, plan)

    def run(self, steps: int) -> float:
        """Median time of a step over a turn of a few, as rank 0 saw it."""
        times = self._workers.ask(steps)[0]
        self.fastest_s = min(self.fastest_s, *times)
        return statistics.median(times)

    def close(self) -> list[dict[str, Any]]:
        """Facts of every process, which ends."""
        found = self._workers.ask(0)
        self._workers.close()
        return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    parser.add_argument("--schedules", default="1f1b,auto", help="panpipe's")
    parser.add_argument("--peers", default="1F1B,ZBVZeroBubble", help="torch.distributed.pipelining's")
    arguments = parser.parse_args()
    jobs = [("one process", "eager")]
    jobs += [("panpipe", name) for name in arguments.schedules.split(",") if name]
    jobs += [("torch", name) for name in arguments.peers.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        # Plans are made in advance, so that memory left by their measurements does not count as training.
        for job, name in jobs:
            if job == "panpipe":
                Contender(job, name, str(Path(folder, f"{name}.json"))).close()
        contenders = [Contender(job, name, str(Path(folder, f"{name}.json"))) for job, name in jobs]
        rounds = []
        for number in range(arguments.rounds):
            order = contenders[number % len(jobs) :] + contenders[: number % len(jobs)]
            rounds.append({contender: contender.run(arguments.steps) for contender in order})
    alone = contenders[0]
    reference = next((c for c in contenders if c.job == "torch"), alone)
    rows = []
    for contender in contenders:
        facts = contender.close()
        step = statistics.median(turn[contender] for turn in rounds)
        speed_up = statistics.median(turn[alone] / turn[contender] for turn in rounds)
        faster = statistics.median(turn[reference] / turn[contender] for turn in rounds)
        above = "/".join(f"{fact['above_mb']:.0f}" for fact in facts)
        plan = facts[0].get("plan", contender.name)
        rows.append((f"{contender.job}: {plan}", f"{step:.3f}", f"{speed_up:.3f}", f"{faster:.3f}", above))
        extra = {"predicted_s": round(facts[0]["predicted_s"], 3)} if contender.job == "panpipe" else {}
        print(json.dumps({"runner": contender.job, "schedule": plan, "step_s": round(step, 4),
                          "fastest_s": round(contender.fastest_s, 4),
                          "over_one_process": round(speed_up, 3), f"over_torch_{reference.name}": round(faster, 3),
                          "peak_above_start_mb": above, **extra}), flush=True)  # fmt: skip
    medians = {contender: statistics.median(turn[contender] for turn in rounds) for contender in contenders}
    fastest = {contender: contender.fastest_s for contender in contenders}
    for ours in contenders:
        for by, found in {"fastest step": fastest, "median": medians}.items():
            theirs = [seconds for other, seconds in found.items() if other.job == "torch"]
            if ours.job == "panpipe" and theirs:
                print(f"panpipe: {ours.name} over the best of torch by the {by}: {min(theirs) / found[ours] - 1:+.1%}")
    if arguments.record:
        header = (
            "runner", "step s", "speed-up over one process", f"over {reference.job} {reference.name}",
            "peak resident MB above the start, rank 0/1",
        )  # fmt: skip
        report(arguments.record, "Two gloo workers, benchmark GPT", header, rows)


if __name__ == "__main__":
    main()
