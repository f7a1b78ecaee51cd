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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from attrs import evolve
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.profile.offload_rates import host_copies

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


def offload(size: Size) -> Results:
    """Rates of copies to the host and back, pinned and pageable; none on the CPU."""
    for found in host_copies(size.where):
        name = f"{'to' if found.to_host else 'from'} {'pinned' if found.pinned else 'pageable'} memory"
        yield name, {"bytes_per_s": found.line.bytes_per_s, "latency_s": found.line.latency_s}


PARTS = {part.__name__: part for part in (versions, parity, offload, *training_parts.PARTS)}


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
