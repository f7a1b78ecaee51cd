"""One part of the first minutes on a GPU: python benchmarks/gpu/run_part.py PART [--out FOLDER] [--toy].

``lease.sh`` runs the parts, each in a process of its own with a limit of its own. What a part has found is printed and
written to ``FOLDER/PART.json`` as soon as it is known. ``--toy`` runs a part at toy size, on the CPU where there is no
GPU, with the same code except what only a GPU has: ``make test`` does, so that the first run on a GPU is not the first.
"""

import argparse
import copy
import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from attrs import evolve
from panpipe.backends import nccl_groups
from panpipe.backends.streams import streams_of
from panpipe.runtimes.devices.host_copies import host_copies
from panpipe.runtimes.diagnose.parity import reference_step

from benchmarks import gpt
from benchmarks.gpu import training_parts
from benchmarks.gpu.training_parts import SGD, Results
from benchmarks.gpu.workload import (
    TOY,
    Size,
    batch_of,
    clear,
    model_of,
    pipeline_of,
    seconds_of,
    step_in_bfloat16,
    synchronize,
)


def versions(size: Size) -> Results:
    """Versions, and which kernels attention runs in F and in B."""
    from torch.profiler import ProfilerActivity, profile

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    activities = [ProfilerActivity.CPU]
    if size.where.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        found |= {"device": torch.cuda.get_device_name(size.where), "nccl": list(torch.cuda.nccl.version())}
    yield "versions", found
    for name, step in (("float32", gpt.step), ("autocast bfloat16", step_in_bfloat16)):
        clear(size)
        with pipeline_of(size, 2, model_of(size), step, batch_of(size)) as pipe:
            pipe.step(batch_of(size))
            everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # stages run on threads
            with profile(activities=activities, experimental_config=everywhere) as seen:
                pipe.step(batch_of(size))
                synchronize(size.where)
        words = ("attention", "flash", "fmha", "softmax", "sdp")
        kernels = sorted({e.key for e in seen.key_averages() if any(word in e.key.lower() for word in words)})
        yield name, {"attention": kernels}


def parity(size: Size) -> Results:
    """The distance of a pipeline from one process after two steps, in bfloat16 and under autocast."""
    small = Size(size.device, min(size.width, 256), 2, 64, 32, size.rows, size.microbatches)
    for name, dtype, step in (
        ("bfloat16", torch.bfloat16, gpt.step),
        ("autocast bfloat16", torch.float32, step_in_bfloat16),
    ):
        model, batch, losses = model_of(small).to(dtype), batch_of(small), []
        alone = copy.deepcopy(model)
        pipe, optimizer = pipeline_of(small, 2, model, step, batch, SGD), SGD(alone.parameters())
        for index in range(2):
            loss = pipe.step(batch).item()
            wanted = reference_step(
                alone, step, batch_of(small, small.where), microbatches=small.microbatches, index=index
            )
            losses.append([loss, wanted.item()])
            optimizer.step()
        pairs = zip(pipe._session.model.parameters(), alone.parameters(), strict=True)
        yield name, {"losses": losses, "parameters apart": max(((a - b).norm() / b.norm()).item() for a, b in pairs)}
        pipe.close()


def _sleep(size: Size, cycles: int) -> None:
    if size.where.type == "cuda":
        torch.cuda._sleep(cycles)


def queues(size: Size) -> Results:
    """How many of 32 streams wait for a kernel of another stream, because they share a hardware queue with it."""
    streams = streams_of(size.where)
    if streams is None:
        yield "streams", {"count": 0, "waiting": 0}
        return
    made = [streams.new(size.where, urgent=False) for _ in range(32)]
    tensors = [torch.zeros(1, device=size.where) for _ in made]
    waiting = 0
    for blocked in range(0, len(made), 8):
        events = []
        synchronize(size.where)
        with streams.using(made[blocked]):
            _sleep(size, 200_000_000)
        for number, stream in enumerate(made):
            with streams.using(stream):
                tensors[number].add_(1)
            events.append(streams.record(stream))
        time.sleep(0.02)
        waiting += sum(not event.event.query() for number, event in enumerate(events) if number != blocked)
        synchronize(size.where)
    yield "streams", {"count": len(made), "waiting": waiting / 4}


def nccl(size: Size) -> Results:
    """NCCL with one rank: groups with few thread blocks, sums on the current stream, and messages to itself.

    A rank sends to itself, which NCCL allows within a group of operations alone, to see whether memory that was sent
    and freed is reused at once, while the transfer waits on its stream. On the CPU the sums go over gloo.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    on_gpu = size.where.type == "cuda"
    values = torch.ones(1 << (22 if on_gpu else 4), device=size.where)
    if on_gpu:
        sums = nccl_groups.sum_communicator([0], 0)
        times = seconds_of(lambda: sums.all_reduce(values), size)
        sums.broadcast(values, 0)
        sums.close()
    else:
        group = dist.new_group([0], backend="gloo")
        times = seconds_of(lambda: dist.all_reduce(values, group=group), size)
    yield "sums", {"available": dist.is_nccl_available(), "least_s": min(times), "equal": bool((values == 1).all())}
    if on_gpu:
        group = dist.new_group([0], backend="nccl")
        sent, got = (torch.ones(1 << 20, device=size.where) for _ in range(2))
        address, other = sent.data_ptr(), torch.cuda.Stream(size.where)
        with torch.cuda.stream(other):
            _sleep(size, 100_000_000)
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, 0, group), dist.P2POp(dist.irecv, got, 0, group)]
            ):
                work.wait()
        del sent, work
        reused = torch.empty(1 << 20, device=size.where).data_ptr() == address
        synchronize(size.where)
        yield "memory of messages", {"reused at once": reused, "received": bool((got == 1).all())}
    dist.destroy_process_group()


def offload(size: Size) -> Results:
    """Rates of copies to the host and back, pinned and pageable; none on the CPU."""
    for found in host_copies(size.where):
        name = f"{'to' if found.to_host else 'from'} {'pinned' if found.pinned else 'pageable'} memory"
        yield name, {"bytes_per_s": found.line.bytes_per_s, "latency_s": found.line.latency_s}


PARTS = {part.__name__: part for part in (versions, parity, queues, nccl, offload, *training_parts.PARTS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="the folder for the results")
    parser.add_argument("--toy", action="store_true", help="at toy size, also without a GPU")
    options = parser.parse_args()
    size = TOY if options.toy else Size()
    if torch.cuda.is_available():
        size = evolve(size, device="cuda:0")
    elif not options.toy:
        print("PyTorch finds no GPU here: run this on a machine with one, or give --toy", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, found in PARTS[options.part](size):
        results[name] = found
        print(json.dumps({name: found}), flush=True)
        (options.out / f"{options.part}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
