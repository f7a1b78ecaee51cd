"""Two gloo workers of one thread each on the benchmark GPT: panpipe beside ``torch.distributed.pipelining``.

Contenders take turns, each in fresh processes; step times are medians over all rounds, barrier to barrier, gradients
only (no optimizer), as the peer's own schedules do it. Memory is resident memory: the peak while training above the
level right before the first step (the kernel's high-water mark is reset there).

    python benchmarks/two_workers.py [--rounds 3] [--steps 10] [--peers 1F1B,ZBVZeroBubble] [--record FILE]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from recording import machine, record

PORT = 29670


def resident(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":"))) / 1024


def measure(run: Callable[[], Any], steps: int, meet: Callable[[], Any]) -> dict[str, Any]:
    """Times of steps, the first two left out, and the peak of resident memory above where it began."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    times = []
    for _ in range(steps + 2):
        meet()
        start = time.perf_counter()
        run()
        meet()
        times.append(time.perf_counter() - start)
    return {"times": times[2:], "before_mb": before, "above_mb": resident("VmHWM") - before}


def one_process(steps: int) -> dict[str, Any]:
    model, (x, y) = gpt.make(), gpt.data()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for a, b in zip(x.chunk(gpt.MICROBATCHES), y.chunk(gpt.MICROBATCHES), strict=True):
            (gpt.step(model, (a, b)) / gpt.MICROBATCHES).backward()

    return measure(run, steps, lambda: None)


def panpipe(rank: int, steps: int, schedule: str, plan: str) -> dict[str, Any]:
    import panpipe as pp

    known = Path(plan)
    pipe = pp.pipeline(
        gpt.make(), gpt.step, gpt.data(), optimizer=None, microbatches=gpt.MICROBATCHES, schedule=schedule,
        plan=known if known.exists() else "auto",
    )  # fmt: skip
    dist.barrier()
    if rank == 0 and not known.exists():
        known.write_text(pp.plan_json(pipe.plan))
    found = measure(lambda: pipe.step(gpt.data()), steps, dist.barrier)
    found["plan"] = pipe.plan.schedule
    found["predicted_s"] = pipe.plan.prediction.step_s
    pipe.close()
    return found


def peer(rank: int, steps: int, schedule: str) -> dict[str, Any]:
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

    def run() -> None:
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
        inputs = (x,) if 0 in mine else ()
        target = {"target": y, "losses": []} if count - 1 in mine else {}
        runner.step(*inputs, **target, return_outputs=False)

    return measure(run, steps, dist.barrier)


def worker(rank: int, job: str, steps: int, name: str, plan: str, port: int, out: Any) -> None:
    torch.set_num_threads(1)
    if job == "one process":
        out.put((0, one_process(steps)))
        return
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    dist.init_process_group("gloo")
    found = panpipe(rank, steps, name, plan) if job == "panpipe" else peer(rank, steps, name)
    out.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def run_job(job: str, name: str, steps: int, plan: str, port: int) -> list[dict[str, Any]]:
    ranks = 1 if job == "one process" else 2
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(worker, (job, steps, name, plan, port, queue), nprocs=ranks, join=False)
    found = dict(queue.get() for _ in range(ranks))
    while not processes.join():
        pass
    return [found[rank] for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--schedules", default="1f1b,auto", help="panpipe's")
    parser.add_argument("--peers", default="1F1B,ZBVZeroBubble", help="torch.distributed.pipelining's")
    parser.add_argument("--record", help="append the result to this Markdown file")
    arguments = parser.parse_args()
    jobs = [("one process", "eager")]
    jobs += [("panpipe", name) for name in arguments.schedules.split(",")]
    jobs += [("torch", name) for name in arguments.peers.split(",") if name]
    rounds: dict[tuple[str, str], list[list[dict[str, Any]]]] = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory() as folder:
        # Plans are made beforehand: what measuring leaves behind in memory is no part of training.
        for number, (job, name) in enumerate(jobs):
            if job == "panpipe":
                run_job(job, name, 1, str(Path(folder, f"{name}.json")), PORT - 1 - number)
        for number in range(arguments.rounds):
            for place, (job, name) in enumerate(jobs):
                plan = str(Path(folder, f"{name}.json"))
                port = PORT + number * len(jobs) + place
                rounds[job, name].append(run_job(job, name, arguments.steps, plan, port))
    alone = statistics.median(t for run in rounds[jobs[0]] for t in run[0]["times"])
    rows = []
    for (job, name), runs in rounds.items():
        step = statistics.median(t for run in runs for t in run[0]["times"])
        above = [statistics.median(run[rank]["above_mb"] for run in runs) for rank in range(len(runs[0]))]
        plan = runs[0][0].get("plan", name)
        fastest = min(t for run in runs for t in run[0]["times"])
        rows.append((f"{job}: {plan}", f"{step:.3f}", f"{alone / step:.2f}", "/".join(f"{mb:.0f}" for mb in above)))
        extra = {"predicted_s": round(runs[0][0]["predicted_s"], 3)} if job == "panpipe" else {}
        print(json.dumps({"runner": job, "schedule": plan, "step_s": round(step, 4),
                          "fastest_s": round(fastest, 4), "speed_up": round(alone / step, 3),
                          "peak_above_start_mb": [round(mb) for mb in above], **extra}), flush=True)  # fmt: skip
    if arguments.record:
        header = ("runner", "step s", "speed-up over one process", "peak resident MB above the start, rank 0/1")
        record(arguments.record, "Two gloo workers, benchmark GPT", machine(), header, rows)


if __name__ == "__main__":
    main()
