"""What a GPU says of predictions: python benchmarks/gpu.py [--out FOLDER].

Several stages on one GPU share it, so that they are no faster than one process: what is compared is predicted against
measured, the cost of an action, and whether copies run beside compute. For a GPT in float32, with 2 and 4 stages:

- step time and saved memory, predicted from rehearsals on the GPU, against timed steps;
- launch overhead: host time of a step over its actions, with stages of next to nothing;
- the share of copy time that lies beside compute, from a trace's CUDA events;
- the allocator's peak against that of one process on the same microbatches.

Writes ``gpu-<machine>.md``. Written where no GPU was: it has not run on one yet.
"""

import argparse
import re
import statistics
import sys
import time
from pathlib import Path

import gpt
import panpipe
import torch
from panpipe.core.trace import COMPUTE_QUEUE, Trace
from panpipe.runtimes.machine import machine
from panpipe.runtimes.reference import reference_step
from torch import nn

MICROBATCHES, ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 8, 64, 256, 512, 8, 8192
STEPS, WARM_UP = 10, 3
GPU = torch.device("cuda", 0)


def model() -> nn.Module:
    """A GPT on the GPU, the same for every run."""
    return gpt.stack(gpt.Block, WIDTH, LAYERS, VOCABULARY).to(GPU)


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    return gpt.data(ROWS, LENGTH, VOCABULARY)


def timed(run, steps: int = STEPS) -> float:
    """Median seconds of a step, after a warm-up."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(steps):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(GPU)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def pipeline(stages: int, **options) -> panpipe.Pipeline:
    names = ",".join(["cuda:0"] * stages)
    return panpipe.pipeline(
        optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, schedule="1f1b", devices=names, share_devices=True,
        max_chunks=1, **options,
    )  # fmt: skip


def beside_compute(trace: Trace) -> float:
    """The share of the time of copies in which some device computes."""
    compute = sorted((e.start_s, e.end_s) for e in trace.events if e.queue == COMPUTE_QUEUE)
    copies = [(e.start_s, e.end_s) for e in trace.events if e.action.peer is not None]
    total = sum(end - start for start, end in copies)
    covered, beside = 0.0, 0.0
    for start, end in copies:
        covered = start
        for begin, until in compute:
            if until > covered and begin < end:
                beside += min(until, end) - max(begin, covered)
                covered = max(covered, min(until, end))
    return beside / total if total else 0.0


def one_process() -> tuple[float, int]:
    """Step time, and the allocator's peak, of one process on the same microbatches."""
    alone, batch = model(), tuple(tensor.to(GPU) for tensor in batch_of())
    optimizer = torch.optim.AdamW(alone.parameters())
    torch.cuda.reset_peak_memory_stats(GPU)

    def run() -> None:
        reference_step(alone, gpt.step, batch, microbatches=MICROBATCHES, seed=0, index=0)
        optimizer.step()

    seconds = timed(run)
    return seconds, torch.cuda.max_memory_allocated(GPU)


def row(stages: int) -> list[str]:
    """What a pipeline of so many stages shows."""
    pipe = pipeline(stages, model=model(), step=gpt.step, example_batch=batch_of())
    batch = batch_of()
    assert pipe.plan.prediction is not None
    predicted = pipe.plan.prediction.step_s
    torch.cuda.reset_peak_memory_stats(GPU)
    seconds = timed(lambda: pipe.step(batch))
    peak = torch.cuda.max_memory_allocated(GPU)
    wanted = sum(pipe.plan.prediction.peak_memory_bytes)
    _, trace = pipe.trace_step(batch)
    pipe.close()
    return [
        str(stages), f"{1e3 * predicted:.2f}", f"{1e3 * seconds:.2f}", f"{100 * (predicted / seconds - 1):+.1f} %",
        f"{wanted / 2**20:.0f}", f"{peak / 2**20:.0f}", f"{100 * beside_compute(trace):.0f} %",
    ]  # fmt: skip


def launch_overhead() -> float:
    """Host microseconds of a compute action whose program is next to nothing."""

    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).mean()

    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))).to(GPU)
    batch = {"x": torch.ones(MICROBATCHES, 1)}
    pipe = pipeline(2, model=layers, step=mean, example_batch=batch)
    seconds = timed(lambda: pipe.step(batch), 5 * STEPS)
    actions = max(len(actions) for actions in pipe.plan.device_actions)
    pipe.close()
    return 1e6 * seconds / actions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py measures on a GPU and PyTorch finds none here: run it on a machine with one")
        return 2
    alone_s, alone_peak = one_process()
    rows = [row(stages) for stages in (2, 4)]
    header = [
        "stages",
        "predicted ms",
        "measured ms",
        "off by",
        "predicted MiB",
        "measured MiB",
        "copies beside compute",
    ]
    table = [header, ["---"] * len(header), *rows]
    text = "\n".join(
        [
            f"# Stages that share one GPU: {machine(GPU)}", "", f"`python benchmarks/gpu.py`, {time.strftime('%F')}.",
            f"One process: {1e3 * alone_s:.2f} ms a step, {alone_peak / 2**20:.0f} MiB at its peak.",
            f"An action with a program of next to nothing: {launch_overhead():.0f} µs.", "",
            *("| " + " | ".join(cells) + " |" for cells in table), "",
        ]
    )  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(GPU).lower()).strip("-")
    (options.out / f"gpu-{name}.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
