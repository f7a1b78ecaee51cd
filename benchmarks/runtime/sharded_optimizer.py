"""Four ranks over gloo, two replicas of a pipeline of two, that share nothing, optimizers (ZeRO-1), gradients (ZeRO-2).

    python benchmarks/runtime/sharded_optimizer.py [--steps STEPS] [--record]

It prints, for each, the predicted and the measured step and memory. The plan is an automatic one, measured on this
machine without sharding; with sharding it is the same plan with other levels. Resident memory is that of a rank after
the steps, less that of the same rank before it had parameters, both without the heap's free memory. It is compared with
the predicted parameters, gradients and optimizer state, which are all that a rank holds between steps. The peak is the
largest resident memory during steps, less the same, and compared with the predicted peak of the device.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import recording
from benchmarks.worker_process import reset_resident_peak, resident_bytes

WIDTH, LAYERS, ROWS, MICROBATCHES = 2048, 12, 32, 4
SHARDS = ("none", "optimizer", "gradients")
MEBI = 2**20
WARM_UP = 3
"""Steps that count neither for times nor for the peak."""
KEYS = {"memory": ("predicted_bytes", "bytes"), "peak": ("predicted_peak", "peak")}
"""What is compared, predicted and measured, by its name."""


def main() -> None:
    """Run both cases, print and record them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--record", action="store_true", help="append to benchmarks/results")
    options.add_argument("--rank", nargs=2, metavar=("SHARD", "FOLDER"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        run_rank(*given.rank, given.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {shard: run_case(shard, Path(folder), given.steps) for shard in SHARDS}
    rows = [row for shard in SHARDS for row in table(shard, found[shard])]
    rows += [fall(found, shard, what) for shard in SHARDS[1:] for what in ("memory", "peak")]
    for row in rows:
        print(" | ".join(row))
    if given.record:
        header = ["shard", "what", "predicted", "measured", "predicted ÷ measured − 1"]
        title = f"{LAYERS} layers of {WIDTH}², AdamW, pp=2,dp=2 over gloo, {given.steps} steps"
        recording.record("benchmarks/results/sharded_optimizer.md", title, recording.machine(), header, rows)


def run_case(shard: str, folder: Path, steps: int) -> list[dict[str, float]]:
    """What each of four ranks found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, __file__, "--steps", str(steps), "--rank", shard, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


def run_rank(shard: str, folder: str, steps: int) -> None:
    """One rank: plan, train, and record its memory and times."""
    import panpipe
    import torch
    from attrs import evolve
    from panpipe.core.plan.sharding import replica_costs
    from panpipe.core.plan.validation.validate import validate

    with panpipe.empty_weights():
        model = torch.nn.Sequential(
            *(part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
        )
    torch.manual_seed(0)  # all ranks of a replica pass one batch
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}
    before: list[int] = []

    def optimizer(named: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=1e-4, foreach=False)  # foreach has a copy of all parameters while it steps

    planned, rank = Path(folder) / "plan.json", int(os.environ["RANK"])
    if shard == "none":
        options = {"mesh": "pp=2,dp=2", "schedule": "1f1b", "max_chunks": 1, "plan_cache": False}
    else:
        plan = panpipe.Plan.load(planned)
        options = {"plan": evolve(plan, shard=(shard,) * len(plan.stages))}
    pipe = panpipe.pipeline(
        model, step, batch, optimizer=optimizer, microbatches=MICROBATCHES, progress=False, **options
    )
    if rank == 0:
        pipe.plan.save(planned)
    prediction = pipe.plan.predicted
    held = sum(p.nbytes for parameters in pipe.stage_parameters.values() for p in parameters.values())
    before.append(resident() - held)  # parameters have values here, gradients and state come with the first step
    times = []
    for number in range(steps):
        if number == WARM_UP:
            forget_peak()
        start = time.perf_counter()
        pipe.step(batch)
        times.append(time.perf_counter() - start)
    position = pipe.plan.mesh.place(rank)[1]
    costs = replica_costs(pipe.plan, prediction.costs)
    own = [costs[stage.index] for stage in pipe.plan.stages_on(position)]
    found = {
        "predicted_peak": validate(pipe.plan).peak_memory_bytes[position],
        "peak": peak() - before[0],
        "predicted_step_s": panpipe.simulate(pipe.plan).step_s,
        "step_s": statistics.median(times[WARM_UP:]),
        "low_s": statistics.quantiles(times[WARM_UP:], n=4)[0],
        "high_s": statistics.quantiles(times[WARM_UP:], n=4)[2],
        "predicted_bytes": sum(c.state_bytes for c in own),
        "bytes": resident() - before[0],
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    pipe.close()


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
    """Rows of one case: the slowest rank's step, and each rank's memory."""
    first = ranks[0]
    slow = max(ranks, key=lambda one: one["step_s"])
    spread = f"{slow['step_s'] * 1e3:.1f} ms ({slow['low_s'] * 1e3:.1f} to {slow['high_s'] * 1e3:.1f}, quartiles)"
    rows = [
        [
            shard,
            "step",
            f"{first['predicted_step_s'] * 1e3:.1f} ms",
            spread,
            off(first["predicted_step_s"], slow["step_s"]),
        ]
    ]
    for rank, one in enumerate(ranks):
        for what, keys in KEYS.items():
            predicted, measured = (one[key] for key in keys)
            sizes = f"{predicted / MEBI:.1f} MiB", f"{measured / MEBI:.1f} MiB"
            rows.append([shard, f"{what} of rank {rank}", *sizes, off(predicted, measured)])
    return rows


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
