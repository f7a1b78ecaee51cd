"""Saved tensors that each schedule holds, predicted and measured, and its step time: the benchmark GPT on four devices.

The devices are threads of one process. Each schedule has its automatic plan, without a contest. Measured values come
from finalizers of the saved tensors' storages during a step; predicted ones from the plan. Each schedule runs in a
process of its own, in which nothing is left of another one. With more workers than cores, step times compare the
schedules' total work more than their bubbles.

    python benchmarks/runtime/schedule_memory.py [--steps 5] [--record FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch

from benchmarks import gpt
from benchmarks.driver import argument_parser, report

DEVICES = 4
SCHEDULES = ("1f1b", "zb-v", "v-half", "v-min")


def measured(schedule: str, steps: int) -> dict[str, Any]:
    """Peaks and times of one schedule, in this process."""
    torch.set_num_threads(1)
    batch, times = gpt.data(), []
    with panpipe.pipeline(
        gpt.make(), gpt.step, batch, optimizer=torch.optim.SGD, microbatches=gpt.MICROBATCHES, mesh=DEVICES,
        plan=panpipe.Auto(schedule=schedule, contest=False, cache=False), run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        for _ in range(steps):
            start = time.perf_counter()
            pipe.step(batch)
            times.append(time.perf_counter() - start)
        _, trace = pipe.trace_step(batch)
    peaks = [
        max(sample.bytes for sample in trace.memory if sample.device == device and sample.kind == "saved")
        for device in range(DEVICES)
    ]
    return {
        "schedule": pipe.plan.schedule, "predicted": list(pipe.plan.predicted.peak_saved_bytes), "measured": peaks,
        "step_s": statistics.median(times),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.steps)))
        return
    rows: list[tuple[str, ...]] = []
    reference = 0
    for name in SCHEDULES:
        command = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
        found = json.loads(done.stdout.splitlines()[-1])
        worst = max(abs(p / m - 1) for p, m in zip(found["predicted"], found["measured"], strict=True))
        reference = reference or max(found["measured"])
        sizes = (" / ".join(f"{size / 1e6:.1f}" for size in found[what]) for what in ("predicted", "measured"))
        over = f"{max(found['measured']) / reference:.3f}"
        rows.append((found["schedule"], *sizes, f"{worst:.1%}", over, f"{found['step_s']:.2f}"))
        print(" | ".join(rows[-1]), flush=True)
    header = (
        "schedule", "predicted peak MB, devices 0–3", "measured", "worst difference", "peak over 1F1B's", "step s"
    )  # fmt: skip
    report(arguments.record, "Saved tensors by schedule, benchmark GPT, four threads", header, rows)


if __name__ == "__main__":
    main()
