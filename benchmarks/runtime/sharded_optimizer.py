"""Four ranks over gloo, two replicas of a pipeline of two, that share nothing, optimizers, gradients or parameters.

    python benchmarks/runtime/sharded_optimizer.py [memory] [steps] [--steps STEPS] [--record]

``memory``: for each level its own ranks, all with one plan, which others made before, without sharding. Resident
memory is that of a rank after the steps, less that of the same rank before it had parameters, both without the heap's
free memory. It is compared with the predicted parameters, gradients and optimizer state, which are all that a rank
holds between steps. The peak is the largest resident memory during steps, less the same, and compared with the
predicted peak of the device.

``steps``: the same ranks have a pipeline of each level, each with its own automatic plan, and train them in turns.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import recording
from benchmarks.worker_process import reset_resident_peak, resident_bytes

WIDTH, LAYERS, ROWS, MICROBATCHES = 2048, 12, 32, 4
SHARDS = ("none", "optimizer", "gradients", "parameters")
"""Levels of sharding: ZeRO-1, 2 and 3."""
MEBI = 2**20
WARM_UP = 3
"""Steps that count neither for times nor for the peak."""
ERROR = "predicted ÷ measured − 1"
PLAN = "plan.json"
REQUEST = {"mesh": "pp=2,dp=2", "schedule": "1f1b", "max_chunks": 1, "plan_cache": False}
KEYS = {"memory": ("predicted_bytes", "bytes"), "peak": ("predicted_peak", "peak")}
"""What is compared, predicted and measured, by its name."""


def main() -> None:
    """Run both parts, print and record them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", metavar="memory|steps", default=["memory", "steps"])
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--record", action="store_true", help="append to benchmarks/results")
    options.add_argument("--rank", nargs=2, metavar=("SHARD", "FOLDER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        run_rank(*given.rank, given.steps)
        return
    title = f"{LAYERS} layers of {WIDTH}², AdamW, pp=2,dp=2 over gloo, {given.steps} steps"
    if "memory" in given.parts:
        show(f"{title}: memory", ["predicted", "measured", ERROR], memory_rows(given.steps), given.record)
    if "steps" in given.parts:
        before = os.getloadavg()[0]
        rows = step_rows(given.steps)
        loads = f"load of the machine {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
        header = ["predicted", "measured", ERROR, "÷ none"]
        show(f"{title} in turns: times; {loads}", header, rows, given.record)


def show(title: str, header: list[str], rows: list[list[str]], record: bool) -> None:
    """Print a table, and record it if asked to."""
    print(title)
    for row in rows:
        print(" | ".join(row))
    if record:
        path, header = "benchmarks/results/sharded_optimizer.md", ["shard", "what", *header]
        recording.record(path, title, recording.machine(), header, rows)


def memory_rows(steps: int) -> list[list[str]]:
    """Memory of each level, and what levels save."""
    with tempfile.TemporaryDirectory() as folder:
        run_case("plan", Path(folder), steps)  # what planning leaves in memory would count for one level only
        found = {shard: run_case(shard, Path(folder), steps) for shard in SHARDS}
    rows = [row for shard in SHARDS for row in table(shard, found[shard])]
    return rows + [fall(found, shard, what) for shard in SHARDS[1:] for what in ("memory", "peak")]


def step_rows(steps: int) -> list[list[str]]:
    """Times of each level, on the first rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_case("turns", Path(folder), steps)
    rows, first = [], 0.0
    for shard in SHARDS:
        one = found[0][shard]
        typical, predicted = statistics.median(one["times"]), one["predicted_s"]
        low, _, high = statistics.quantiles(one["times"], n=4)
        first = first or typical
        rows.append([
            shard, "step", milliseconds(predicted),
            f"{milliseconds(typical)} ({low * 1e3:.0f} to {high * 1e3:.0f}, quartiles)", off(predicted, typical),
            f"{typical / first:.2f}",
        ])  # fmt: skip
    return rows


def run_case(shard: str, folder: Path, steps: int) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, __file__, "--steps", str(steps), "--rank", shard, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


def run_rank(shard: str, folder: str, steps: int) -> None:
    """One rank."""
    rank = int(os.environ["RANK"])
    if shard == "turns":
        found = run_turns(steps)
    elif shard == "plan":
        found = save_plan(Path(folder) / PLAN, rank)
    else:
        found = run_memory(shard, Path(folder) / PLAN, steps)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def pipeline(batch: dict[str, Any], **options: Any) -> Any:
    """A pipeline of the model."""
    import panpipe
    import torch

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=1e-4, foreach=False)  # foreach has a copy of all parameters while it steps

    with panpipe.empty_weights():
        model = torch.nn.Sequential(
            *(part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
        )
    return panpipe.pipeline(
        model, step, batch, optimizer=optimizer, microbatches=MICROBATCHES, progress=False, **options
    )


def batch_of_ranks() -> dict[str, Any]:
    """One batch for all ranks of a replica."""
    import torch

    torch.manual_seed(0)
    return {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}


def run_turns(steps: int) -> dict[str, Any]:
    """Plan for each level, and train in turns."""
    import panpipe
    import torch

    batch = batch_of_ranks()
    pipes = {shard: pipeline(batch, **REQUEST, **({} if shard == "none" else {"shard": shard})) for shard in SHARDS}
    found = {
        shard: {
            "predicted_s": panpipe.simulate(pipe.plan).step_s,
            "times": [],
        }
        for shard, pipe in pipes.items()
    }
    for number in range(steps):
        for shard, pipe in pipes.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            pipe.step(batch)
            if number >= WARM_UP:
                found[shard]["times"].append(time.perf_counter() - start)
    for pipe in reversed(pipes.values()):  # the first one has created the job's process group, and ends it
        pipe.close()
    return found


def save_plan(path: Path, rank: int) -> dict[str, Any]:
    """Plan without sharding. All ranks plan together, and the first one writes the file."""
    pipe = pipeline(batch_of_ranks(), **REQUEST)
    if rank == 0:
        pipe.plan.save(path)
    pipe.close()
    return {}


def run_memory(shard: str, planned: Path, steps: int) -> dict[str, float]:
    """Train with the plan at a level, and measure memory."""
    import panpipe
    from attrs import evolve
    from panpipe.core.plan.sharding import replica_costs
    from panpipe.core.plan.validation.validate import validate
    from panpipe.core.search.unsharded_runs import with_runs

    batch = batch_of_ranks()
    plan = panpipe.Plan.load(planned)
    if shard != "none":
        known = plan.predicted
        limits = [device.memory_bytes for device in known.cluster.devices[: plan.devices]]
        plan = evolve(plan, shard=(shard,) * len(plan.stages))
        plan = with_runs(plan, known.costs, known.cluster, limits)
    pipe = pipeline(batch, plan=plan)
    rank = int(os.environ["RANK"])
    position = pipe.plan.mesh.place(rank)[1]
    costs = replica_costs(pipe.plan, pipe.plan.predicted.costs)
    held = sum(costs[stage.index].parameter_bytes for stage in pipe.plan.stages_on(position))
    before = resident() - held  # parameters have values here, gradients and state come with the first step
    for number in range(steps):
        if number == WARM_UP:
            forget_peak()
        pipe.step(batch)
    found = {
        "predicted_peak": validate(pipe.plan).peak_memory_bytes[position],
        "peak": peak() - before,
        "predicted_bytes": sum(costs[stage.index].state_bytes for stage in pipe.plan.stages_on(position)),
        "bytes": resident() - before,
    }
    pipe.close()
    return found


def step(model: object, batch: dict[str, object]) -> object:
    """The loss."""
    import torch

    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])  # type: ignore[operator,arg-type]


def resident() -> int:
    """Bytes of memory that this process has and uses."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise what was freed earlier counts, and is reused later
    return resident_bytes("VmRSS")


def forget_peak() -> None:
    """Begin to record the peak of resident memory again."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_resident_peak()


def peak() -> int:
    """The largest resident memory since `forget_peak`, in bytes."""
    return resident_bytes("VmHWM")


def table(shard: str, ranks: list[dict[str, float]]) -> list[list[str]]:
    """Rows of one case: each rank's memory."""
    rows = []
    for rank, one in enumerate(ranks):
        for what, keys in KEYS.items():
            predicted, measured = (one[key] for key in keys)
            sizes = f"{predicted / MEBI:.1f} MiB", f"{measured / MEBI:.1f} MiB"
            rows.append([shard, f"{what} of rank {rank}", *sizes, off(predicted, measured)])
    return rows


def milliseconds(seconds: float) -> str:
    """A time in a table."""
    return f"{seconds * 1e3:.0f} ms"


def fall(found: dict[str, list[dict[str, float]]], shard: str, what: str) -> list[str]:
    """The row of the memory that a level saves, over all ranks."""
    predicted, measured = (
        sum(whole[key] - part[key] for whole, part in zip(found["none"], found[shard], strict=True))
        for key in KEYS[what]
    )
    sizes = f"{predicted / MEBI:.1f} MiB", f"{measured / MEBI:.1f} MiB"
    return [f"none − {shard}", f"{what} of all ranks", *sizes, off(predicted, measured)]


def off(predicted: float, measured: float) -> str:
    """The error of a prediction."""
    return f"{predicted / measured - 1:+.1%}"


if __name__ == "__main__":
    main()
