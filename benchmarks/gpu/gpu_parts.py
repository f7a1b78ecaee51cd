"""The parts of ``gpu.py``: functions that measure one thing on a GPU and return it as JSON.

Each also runs on the CPU at toy size, with the same code except what only a GPU has: without streams, and with
the times of calls for those of kernels.
"""

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import panpipe
import torch
from panpipe.backends import nccl_groups
from panpipe.backends.streams import streams_of
from panpipe.core.trace.trace import COMPUTE_QUEUE, Trace
from panpipe.runtimes.devices.host_copies import host_copies
from panpipe.runtimes.diagnose.reference import reference_step
from torch import nn

from benchmarks import gpt
from benchmarks.gpu.graph_steps import graphs
from benchmarks.gpu.workload import (
    TOY,
    Found,
    Size,
    batch_of,
    clear,
    model_of,
    peak_bytes,
    pipeline_of,
    seconds_of,
    step_in_bfloat16,
    summary,
    synchronize,
)


def versions(size: Size) -> Found:
    """Versions, and which kernels attention runs in F and in B."""
    from torch.profiler import ProfilerActivity, profile

    found: Found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    activities = [ProfilerActivity.CPU]
    if size.where.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        found["device"] = torch.cuda.get_device_name(size.where)
        found["nccl"] = list(torch.cuda.nccl.version())
    for name, step in (("float32", gpt.step), ("autocast bfloat16", step_in_bfloat16)):
        model, batch = model_of(size), batch_of(size)
        pipe = pipeline_of(size, 2, model, step, batch)
        pipe.step(batch)
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # stages run on threads
        with profile(activities=activities, experimental_config=everywhere) as seen:
            pipe.step(batch)
            synchronize(size.where)
        pipe.close()
        words = ("attention", "flash", "fmha", "softmax", "sdp")
        found[name] = sorted({e.key for e in seen.key_averages() if any(word in e.key.lower() for word in words)})
        clear(size)
    return found


def parity(size: Size) -> Found:
    """The distance of a pipeline from one process after two steps, in bfloat16 and under autocast."""
    found: Found = {}
    small = Size(size.device, min(size.width, 256), 2, 64, 32, size.rows, size.microbatches)
    for name, dtype, step in (
        ("bfloat16", torch.bfloat16, gpt.step),
        ("autocast bfloat16", torch.float32, step_in_bfloat16),
    ):
        model = model_of(small).to(dtype)
        alone, batch = copy.deepcopy(model), batch_of(small)
        sgd = partial(torch.optim.SGD, lr=0.1)
        pipe, optimizer, here = pipeline_of(small, 2, model, step, batch, sgd), sgd(alone.parameters()), []
        for index in range(2):
            loss = pipe.step(batch).item()
            wanted = reference_step(
                alone, step, batch_of(small, small.where), microbatches=small.microbatches, index=index
            )
            here.append([loss, wanted.item()])
            optimizer.step()
        apart = max(
            ((a - b).norm() / b.norm()).item() for a, b in zip(pipe.model.parameters(), alone.parameters(), strict=True)
        )
        pipe.close()
        found[name] = {"losses": here, "parameters apart": apart}
    return found


def one_process(size: Size, compiler: str | None) -> Found:
    """Plain PyTorch on the same microbatches: eager, or with the model compiled."""
    clear(size)
    model, batch = model_of(size), batch_of(size, size.where)
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_in_bfloat16 if compiler is None else torch.compile(step_in_bfloat16, backend=compiler)

    def run() -> None:
        optimizer.zero_grad()
        for x, y in zip(*(tensor.chunk(size.microbatches) for tensor in batch), strict=True):
            (step(model, (x, y)) / size.microbatches).backward()
        optimizer.step()

    return {**summary(seconds_of(run, size)), "peak_bytes": peak_bytes(size)}


def steps(size: Size) -> Found:
    """A GPT with 1, 2 and 4 stages on one device against plain eager PyTorch."""
    return {"eager": one_process(size, None), **of_stages(size, None)}


def compiled_steps(size: Size) -> Found:
    """The same with compiled stages, against ``torch.compile`` of the step."""
    return {"torch.compile": one_process(size, size.compiler), **of_stages(size, size.compiler)}


def of_stages(size: Size, compile: str | None) -> Found:
    """Steps of pipelines with 1, 2 and 4 stages."""
    found: Found = {}
    for stages in size.stages:
        clear(size)
        batch, started = batch_of(size), time.perf_counter()
        pipe = pipeline_of(size, stages, model_of(size), step_in_bfloat16, batch, compile=compile)
        built_s = time.perf_counter() - started
        seconds = seconds_of(partial(pipe.step, batch), size)
        peak = peak_bytes(size)
        _, trace = pipe.trace_step(batch)
        pipe.close()
        found[f"{stages} stages"] = {
            **summary(seconds), "built_s": built_s, "peak_bytes": peak, "saved_bytes": saved_peaks(trace),
            "copies during compute": overlap_with_compute(trace),
        }  # fmt: skip
    return found


def overlap_with_compute(trace: Trace) -> float:
    """The share of the time of copies in which some device computes."""
    compute = sorted((e.start_s, e.end_s) for e in trace.events if e.queue == COMPUTE_QUEUE)
    copies = [(e.start_s, e.end_s) for e in trace.events if e.action.peer is not None]
    total, overlap = sum(end - start for start, end in copies), 0.0
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


def calls(size: Size) -> Found:
    """Microseconds of the host for an action with almost no computation, with 1, 2 and 4 threads."""

    def mean(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).mean()

    found: Found = {}
    for stages in size.stages:
        layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))).to(size.where)
        batch = (torch.ones(size.microbatches, 1),)
        pipe = pipeline_of(size, stages, layers, mean, batch)
        seconds = statistics.median(seconds_of(partial(pipe.step, batch), size, 5 * size.steps))
        actions = max(len(actions) for actions in pipe.plan.device_actions)
        pipe.close()
        found[f"{stages} threads"] = {"us_per_action": 1e6 * seconds / actions, "actions": actions}
    return found


def _slept(size: Size, cycles: int) -> None:
    if size.where.type == "cuda":
        torch.cuda._sleep(cycles)


def queues(size: Size) -> Found:
    """How many of 32 streams wait for a kernel of another stream, because they share a hardware queue with it."""
    streams = streams_of(size.where)
    if streams is None:
        return {"streams": 0, "waiting": 0}
    made = [streams.new(size.where, urgent=False) for _ in range(32)]
    tensors = [torch.zeros(1, device=size.where) for _ in made]
    waiting = 0
    for blocked in range(0, len(made), 8):
        events = []
        synchronize(size.where)
        with streams.using(made[blocked]):
            _slept(size, 200_000_000)
        for number, stream in enumerate(made):
            with streams.using(stream):
                tensors[number].add_(1)
            events.append(streams.record(stream))
        time.sleep(0.02)
        waiting += sum(not event.query() for number, event in enumerate(events) if number != blocked)
        synchronize(size.where)
    return {"streams": len(made), "waiting": waiting / 4}


def loading(size: Size) -> Found:
    """Whether the first launch of a kernel waits for kernels that run on another stream: lazy loading."""
    functions = (torch.special.i0e, torch.special.erfcx, torch.lgamma, torch.special.ndtri)
    values, streams = torch.rand(1000, device=size.where), streams_of(size.where)
    synchronize(size.where)
    found: Found = {}
    for function in functions:
        times = []
        for _ in range(2):
            if streams is not None:
                with streams.using(streams.named("busy", size.where)):
                    _slept(size, 100_000_000)
            start = time.perf_counter()
            function(values)
            times.append(time.perf_counter() - start)
            synchronize(size.where)
        found[function.__name__] = {"first_s": times[0], "second_s": times[1]}
    return found


def nccl(size: Size) -> Found:
    """NCCL with one rank: groups with few thread blocks, sums on the current stream, and messages to itself."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: Found = {"nccl": dist.is_nccl_available()}
    on_gpu = size.where.type == "cuda"
    values = torch.ones(1 << (22 if on_gpu else 4), device=size.where)
    if not on_gpu:  # the same calls, over gloo
        group = dist.new_group([0], backend="gloo")
        found["sum"] = summary(seconds_of(lambda: dist.all_reduce(values, group=group), size))
        dist.destroy_process_group()
        return found
    sums = nccl_groups.sum_communicator([0], 0)
    found["sum"] = summary(seconds_of(lambda: sums.all_reduce(values), size))
    sums.broadcast(values, 0)
    found["equal"] = bool((values == 1).all())
    found["record_stream"] = recorded_streams(size)
    sums.close()
    dist.destroy_process_group()
    return found


def recorded_streams(size: Size) -> Found:
    """Whether memory that was sent and freed is reused at once, while the transfer waits on its stream.

    A rank sends to itself, which NCCL allows within a group of operations alone.
    """
    import torch.distributed as dist

    group = dist.new_group([0], backend="nccl")
    sent, got = (torch.ones(1 << 20, device=size.where) for _ in range(2))
    address, other = sent.data_ptr(), torch.cuda.Stream(size.where)
    with torch.cuda.stream(other):
        _slept(size, 100_000_000)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, 0, group), dist.P2POp(dist.irecv, got, 0, group)]
        ):
            work.wait()
    del sent, work
    reused = torch.empty(1 << 20, device=size.where).data_ptr() == address
    synchronize(size.where)
    return {"reused at once": reused, "received": bool((got == 1).all())}


def offload(size: Size) -> Found:
    """Rates of copies to the host and back, pinned and pageable; none on the CPU."""
    return {
        "copies": [
            {"to_host": c.to_host, "pinned": c.pinned, "bytes_per_s": c.line.bytes_per_s, "latency_s": c.line.latency_s}
            for c in host_copies(size.where)
        ]
    }


def prediction(size: Size) -> Found:
    """An automatic plan's prediction against the measured step and peak."""
    found: Found = {}
    for stages in (count for count in size.stages if count > 1):
        clear(size)
        batch, started = batch_of(size), time.perf_counter()
        pipe = panpipe.pipeline(
            model_of(size), step_in_bfloat16, batch, optimizer=torch.optim.AdamW, microbatches=size.microbatches,
            schedule="1f1b", devices=",".join([size.device] * stages), share_devices=True, max_chunks=1,
            plan_cache=False, progress=False,
        )  # fmt: skip
        planned_s, predicted = time.perf_counter() - started, pipe.plan.prediction
        assert predicted is not None
        clear(size)
        seconds = seconds_of(partial(pipe.step, batch), size)
        found[f"{stages} stages"] = {
            **summary(seconds), "planned_s": planned_s, "predicted_s": predicted.step_s,
            "off_by": predicted.step_s / statistics.median(seconds) - 1,
            "predicted_peak_bytes": sum(predicted.peak_memory_bytes), "peak_bytes": peak_bytes(size),
        }  # fmt: skip
        pipe.close()
    return found


PARTS = (versions, parity, steps, calls, queues, loading, nccl, offload, prediction, compiled_steps, graphs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    size = TOY if options.toy else Size()
    if not options.toy and not torch.cuda.is_available():
        print("PyTorch finds no GPU here: run this on a machine with one, or give --toy", file=sys.stderr)
        return 2
    part = next(part for part in PARTS if part.__name__ == options.part)
    options.file.write_text(json.dumps(part(size), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
