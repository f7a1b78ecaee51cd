"""Saved tensors that each schedule holds, predicted and measured, and its step time: the benchmark GPT on four devices.

The devices are threads of one process, one core thread each. Measured is what the finalizers of the saved tensors'
storages tell while a step runs; predicted is what the plan said before. The table's ratio is to 1F1B's peak in the same
run; the published one is that of the papers' uniform model at four devices: 1F1B and ZB-V hold p microbatches, V-Half
(p + 2) // 2 and V-Min (p + 4) // 3 (Controllable Memory, section 3). With more workers than cores step times compare
the schedules' total work, not their bubbles.

    python benchmarks/schedule_memory.py [--steps 5] [--record FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import gpt
import torch
from recording import machine, record

DEVICES = 4
PUBLISHED = {"1f1b": 4, "zb-v": 4, "v-half": (DEVICES + 2) // 2, "v-min": (DEVICES + 4) // 3}
"""Microbatches of a device's whole share that each schedule holds at most."""


def measured(name: str, steps: int) -> dict[str, Any]:
    """Peaks and times of one schedule, in this process."""
    import panpipe

    torch.set_num_threads(1)
    pipe = panpipe.pipeline(
        gpt.make(), gpt.step, gpt.data(), optimizer=None, microbatches=gpt.MICROBATCHES, schedule=name, mesh=DEVICES
    )
    batch, times = gpt.data(), []
    for _ in range(steps):
        start = time.perf_counter()
        pipe.step(batch)
        times.append(time.perf_counter() - start)
    _, trace = pipe.trace_step(batch)
    peaks = [
        max(sample.bytes for sample in trace.memory if sample.device == device and sample.kind == "saved")
        for device in range(DEVICES)
    ]
    prediction = pipe.plan.prediction
    assert prediction is not None
    pipe.close()
    return {
        "schedule": pipe.plan.schedule,
        "predicted": list(prediction.peak_saved_bytes),
        "measured": peaks,
        "step_s": statistics.median(times),
        "predicted_s": prediction.step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", help="append the result to this Markdown file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.steps)))
        return
    rows: list[tuple[str, ...]] = []
    reference = 0
    for name, count in PUBLISHED.items():
        # A process each: nothing that one leaves behind is in the way of the next.
        words = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
        found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        worst = max(abs(p / m - 1) for p, m in zip(found["predicted"], found["measured"], strict=True))
        peak = max(found["measured"])
        reference = reference or peak
        print(json.dumps({**found, "off": round(worst, 4), "over_1f1b": round(peak / reference, 3)}), flush=True)
        rows.append(
            (
                found["schedule"],
                " / ".join(f"{size / 1e6:.1f}" for size in found["predicted"]),
                " / ".join(f"{size / 1e6:.1f}" for size in found["measured"]),
                f"{worst:.1%}",
                f"{peak / reference:.3f}",
                f"{count / DEVICES:.3f}",
                f"{found['step_s']:.2f}",
            )
        )
    if arguments.record:
        header = (
            "schedule", "predicted peak MB, devices 0–3", "measured", "worst difference", "peak over 1F1B's",
            "published", "step s",
        )  # fmt: skip
        record(arguments.record, "Saved tensors by schedule, benchmark GPT, four threads", machine(), header, rows)


if __name__ == "__main__":
    main()
