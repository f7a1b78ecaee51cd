"""Predictions against measurements on a GPU: python benchmarks/gpu.py [--out FOLDER].

Several stages on one GPU share it, so they are no faster than one process. The benchmark compares predicted with
measured values, and measures the cost of an action and the overlap of copies with compute. For a GPT in float32, with 2
and 4 stages:

- step time, the peak of saved tensors and the allocator's peak, predicted from rehearsals on the GPU, against timed
  steps and one process on the same microbatches;
- the share of copy time that overlaps with compute, from a trace's CUDA events;
- launch overhead: the time of an action with almost no computation.

Writes ``gpu-<machine>.md`` with all measurements that succeed. Takes some minutes. It has not run on a GPU yet.
"""

import argparse
import gc
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpt
import panpipe
import torch
from panpipe.core.trace.trace import COMPUTE_QUEUE, Trace
from panpipe.runtimes.devices.machine import machine
from panpipe.runtimes.diagnose.reference import reference_step
from torch import nn

MICROBATCHES, ROWS, LENGTH, WIDTH, LAYERS, VOCABULARY = 8, 64, 256, 512, 8, 8192
STEPS, WARM_UP = 10, 3
GPU = torch.device("cuda", 0)
HEADER = (
    "stages", "predicted ms", "measured ms", "off by", "saved MiB predicted", "measured", "peak MiB predicted",
    "measured", "of it cuBLAS", "copies during compute",
)  # fmt: skip


def model() -> nn.Module:
    """A GPT on the GPU, the same for every run."""
    return gpt.stack(gpt.Block, WIDTH, LAYERS, VOCABULARY).to(GPU)


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    return gpt.data(ROWS, LENGTH, VOCABULARY)


def timed(run: Callable[[], object], steps: int = STEPS) -> float:
    """Median seconds of a step, after a warm-up; the allocator's peak is that of these steps."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    found = []
    for _ in range(steps):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(GPU)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def workspaces() -> int:
    """Bytes that cuBLAS keeps for each stream that it was used on, given back; no prediction knows of them."""
    before = torch.cuda.memory_allocated(GPU)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(GPU)


def empty() -> None:
    """Give everything back that the measurement before held."""
    gc.collect()
    workspaces()
    torch.cuda.empty_cache()


def pipeline(stages: int, **options) -> panpipe.Pipeline:
    names = ",".join(["cuda:0"] * stages)
    return panpipe.pipeline(
        optimizer=torch.optim.AdamW, microbatches=MICROBATCHES, schedule="1f1b", devices=names, share_devices=True,
        max_chunks=1, plan_cache=False, **options,
    )  # fmt: skip


def beside_compute(trace: Trace) -> float:
    """The share of the time of copies in which some device computes."""
    compute = sorted((e.start_s, e.end_s) for e in trace.events if e.queue == COMPUTE_QUEUE)
    copies = [(e.start_s, e.end_s) for e in trace.events if e.action.peer is not None]
    total = sum(end - start for start, end in copies)
    covered, overlap = 0.0, 0.0
    for start, end in copies:
        covered = start
        for begin, until in compute:
            if until > covered and begin < end:
                overlap += min(until, end) - max(begin, covered)
                covered = max(covered, min(until, end))
    return overlap / total if total else 0.0


def saved_peaks(trace: Trace) -> int:
    """Bytes of the saved tensors at the peak of each device, added up."""
    peaks: dict[int, int] = {}
    for sample in trace.memory:
        peaks[sample.device] = max(sample.bytes, peaks.get(sample.device, 0))
    return sum(peaks.values())


def one_process() -> str:
    """Step time, and the allocator's peak, of one process on the same microbatches."""
    alone, batch = model(), tuple(tensor.to(GPU) for tensor in batch_of())
    optimizer = torch.optim.AdamW(alone.parameters())

    def run() -> None:
        reference_step(alone, gpt.step, batch, microbatches=MICROBATCHES, seed=0, index=0)
        optimizer.step()

    seconds = timed(run)
    peak = torch.cuda.max_memory_allocated(GPU)
    return (
        f"One process, the same microbatches: {1e3 * seconds:.2f} ms a step, {_mib(peak)} MiB at its peak, of which "
        f"{_mib(workspaces())} are cuBLAS's workspaces."
    )


def row(stages: int) -> str:
    """The measurements of a pipeline with this number of stages."""
    started = time.perf_counter()
    pipe = pipeline(stages, model=model(), step=gpt.step, example_batch=batch_of())
    print(f"{stages} stages: planned in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    batch, prediction = batch_of(), pipe.plan.prediction
    assert prediction is not None
    seconds = timed(lambda: pipe.step(batch))
    peak = torch.cuda.max_memory_allocated(GPU)
    _, trace = pipe.trace_step(batch)
    pipe.close()
    cells = [
        str(stages), f"{1e3 * prediction.step_s:.2f}", f"{1e3 * seconds:.2f}",
        f"{100 * (prediction.step_s / seconds - 1):+.1f} %", _mib(sum(prediction.peak_saved_bytes)),
        _mib(saved_peaks(trace)), _mib(sum(prediction.peak_memory_bytes)), _mib(peak), _mib(workspaces()),
        f"{100 * beside_compute(trace):.0f} %",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def launch_overhead() -> str:
    """Microseconds of a compute action whose program is next to nothing: what issuing takes the host."""

    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).mean()

    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))).to(GPU)
    batch = {"x": torch.ones(MICROBATCHES, 1)}
    pipe = pipeline(2, model=layers, step=mean, example_batch=batch)
    seconds = timed(lambda: pipe.step(batch), 5 * STEPS)
    actions = max(len(actions) for actions in pipe.plan.device_actions)
    pipe.close()
    return (
        f"An action with a program of next to nothing, 2 stages: {1e6 * seconds / actions:.0f} µs, its messages, the "
        "optimizer and the end of the step included."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py measures on a GPU and PyTorch finds none here: run it on a machine with one")
        return 2
    lines = [
        f"# Stages that share one GPU: {machine(GPU)}", "",
        f"`python benchmarks/gpu.py`, {time.strftime('%F')}: a GPT of {LAYERS} layers, width {WIDTH}, float32, batches "
        f"of {ROWS} × {LENGTH} tokens in {MICROBATCHES} microbatches, AdamW, 1F1B. Peaks predicted are those of all "
        "stages added up, which need not come at the same moment.", "",
    ]  # fmt: skip
    table = [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    results, failed = [], False
    for measure in (one_process, launch_overhead, partial(row, 2), partial(row, 4)):
        try:
            results.append(measure())
        except Exception as error:
            traceback.print_exc()
            results.append(f"{measure} failed: {type(error).__name__}: {error}")
            failed = True
        empty()
    lines += [*results[:2], "", *table, *results[2:]]
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(GPU).lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gpu-{name}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
