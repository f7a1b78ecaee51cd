"""One part of the first minutes on a GPU: python benchmarks/gpu/run_part.py PART [--out FOLDER] [--toy].

Memory, predictions and steps next to plain PyTorch, and copies to the host. ``lease.sh`` runs the parts, each in a
process of its own with a limit of its own. What a part has found is printed and written to ``FOLDER/PART.json`` as soon
as it is known, with the versions. ``--toy`` runs a part at toy size, on the CPU where there is no GPU, with the same
code except what only a GPU has: ``make test`` does, so that the first run on a GPU is not the first.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import panpipe
import torch
from attrs import evolve, frozen
from panpipe.benchmarks import gpt
from panpipe.benchmarks.driver import seconds
from panpipe.core.actions import Kind
from panpipe.core.capture.export.operators import Operators, operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.cluster.cluster import Cluster, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.offload.choice import everything
from panpipe.core.offload.plan_offload import offloadable, with_offload
from panpipe.core.plan.plan import Plan
from panpipe.core.trace.trace import COMPUTE_QUEUE, Trace, TraceEvent
from panpipe.runtimes.offload.offloads import offloadable_storages
from panpipe.runtimes.profile.offload_rates import host_copies
from panpipe.runtimes.programs.compiled import compile_stages
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

Found = dict[str, Any]
Results = Iterator[tuple[str, Found]]
"""What a part has found so far, by name: it is written at once, so that a part that is stopped keeps it."""
SGD = partial(torch.optim.SGD, lr=0.1)


@frozen
class Size:
    """What is trained, and where.

    Args:
        device: the torch device that all stages share.
        width, layers, vocabulary, length: of the GPT.
        rows, microbatches: of a batch.
        steps, warm_up: timed steps, and steps before them.
        stages: numbers of stages.
        widths: the three models whose predictions are compared with measurements.
        memory_bytes: what the part ``memory`` may use of the GPU.
        short_of_memory: the changes with which the activations exceed that.
    """

    device: str = "cuda:0"
    width: int = 2048
    layers: int = 8
    vocabulary: int = 16384
    length: int = 1024
    rows: int = 32
    microbatches: int = 8
    steps: int = 5
    warm_up: int = 3
    stages: tuple[int, ...] = (1, 2, 4)
    widths: tuple[int, int, int] = (1024, 2048, 3072)
    memory_bytes: int = 28 << 30
    short_of_memory: Mapping[str, Any] = {
        "width": 4096, "vocabulary": 4096, "rows": 64, "microbatches": 4, "steps": 2, "warm_up": 1, "stages": (8,)
    }  # fmt: skip

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


TOY = Size(
    "cpu", 16, 2, 32, 8, 4, 2, 1, 1, (1, 2), widths=(16, 32, 48),
    short_of_memory={"width": 256, "layers": 4, "length": 256, "rows": 8, "stages": (4,)},
)  # fmt: skip


def step_in_bfloat16(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The training step, in bfloat16 by autocast."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return gpt.step(model, batch)


def model_of(size: Size) -> nn.Module:
    with size.where:  # a host needs seconds for a billion random numbers
        return gpt.stack(gpt.Block, size.width, size.layers, size.vocabulary)


def batch_of(size: Size) -> tuple[torch.Tensor, ...]:
    return gpt.data(size.rows, size.length, size.vocabulary)


def operators_on(size: Size, model: nn.Module, step: Any, batch: Any) -> Operators:
    """The step of a microbatch, captured."""
    piece = tuple(tensor[: len(tensor) // size.microbatches].to(size.where) for tensor in batch)
    return operators_of(capture_step(model, step, piece, device=size.where.type))


def pipeline_of(
    size: Size, plan: Plan | int, model: nn.Module, step: Any, batch: Any, optimizer: Any = torch.optim.AdamW,
    memory: panpipe.Memory | None = None, **options: Any,
) -> panpipe.Pipeline:  # fmt: skip
    """A pipeline whose devices share the torch device, by a plan, or by an even one with this many stages."""
    if isinstance(plan, int):
        plan = gpt.even_plan_of(operators_on(size, model, step, batch), size.microbatches, plan)
    names = ",".join([size.device] * len(plan.device_actions))
    return panpipe.pipeline(
        model, step, batch, plan=plan, optimizer=optimizer, devices=names, memory=memory,
        run=panpipe.Run(share_devices=True, progress=False, **options),
    )  # fmt: skip


def eager(size: Size, model: nn.Module, step: Any, batch: Any, optimizer: Any = torch.optim.AdamW) -> Found:
    """Plain PyTorch on the same microbatches."""
    here = tuple(tensor.to(size.where) for tensor in batch)
    update = optimizer(model.parameters())

    def run() -> torch.Tensor:
        loss = gpt.accumulate(model, here, size.microbatches, step)
        update.step()
        return loss

    return measured(size, run)


def measured(size: Size, run: Callable[[], torch.Tensor], compared: Found | None = None) -> Found:
    """Times, peak and losses of steps.

    Args:
        size: has their number, and the tokens of each.
        run: a step, which returns its loss.
        compared: steps that have to have equal losses.
    """
    cuda = size.where.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(size.where)
    losses: list[torch.Tensor] = []
    meet = partial(torch.cuda.synchronize, size.where) if cuda else None
    times = seconds(lambda: losses.append(run()), size.warm_up + size.steps, meet)[size.warm_up :]
    median = statistics.median(times)
    found: Found = {
        "median_s": median, "least_s": min(times), "most_s": max(times),
        "tokens_per_s": size.rows * size.length / median,
        "peak_bytes": torch.cuda.max_memory_allocated(size.where) if cuda else None,
        "losses": [loss.item() for loss in losses],
    }  # fmt: skip
    if compared is not None and "losses" in compared:
        one, other = (torch.tensor(each["losses"], dtype=torch.float64) for each in (found, compared))
        found["losses_apart"] = (one / other - 1).abs().max().item()  # NaN if a loss is
        found["slower"] = median / compared["median_s"] - 1
    return found


def share_during(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The share of the time of some spans in which there is one of the others."""
    total, overlap, sorted_others = sum(end - start for start, end in spans), 0.0, sorted(others)
    for start, end in spans:
        covered = start
        for begin, until in sorted_others:
            if until > covered and begin < end:
                overlap += min(until, end) - max(begin, covered)
                covered = max(covered, min(until, end))
    return overlap / total if total else 0.0


def clear(size: Size) -> None:
    """Free what the measurement before held."""
    gc.collect()
    if size.where.type == "cuda":
        torch.cuda.init()  # without it the calls below refuse the device
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def offload(size: Size) -> Results:
    """Rates of copies to the host and back, pinned and pageable; none on the CPU."""
    for found in host_copies(size.where):
        name = f"{'to' if found.to_host else 'from'} {'pinned' if found.pinned else 'pageable'} memory"
        yield name, {"bytes_per_s": found.line.bytes_per_s, "latency_s": found.line.latency_s}


def checkpointed_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The step with every block recomputed by `torch.utils.checkpoint`."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        x = batch[0]
        for layer in model.children():
            x = checkpoint(layer, x, use_reentrant=False) if isinstance(layer, gpt.Block) else layer(x)
        return gpt.loss_of(x, batch[1])


def step_saved_on_cpu(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with save_on_cpu(pin_memory=batch[0].device.type == "cuda"):
        return step_in_bfloat16(model, batch)


def memory(size: Size) -> Results:
    """A model that does not fit: recomputed and offloaded by stages, and by PyTorch's own means, under one limit."""
    size = evolve(size, **size.short_of_memory)
    batch, tried = batch_of(size), dict[str, Found]()
    if size.where.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(size.memory_bytes / torch.cuda.get_device_properties(size.where).total_memory, 1.0), size.where
        )
    yield "limit", {"bytes": size.memory_bytes}
    for name, step in (
        ("eager", step_in_bfloat16), ("checkpoint", checkpointed_step), ("save_on_cpu", step_saved_on_cpu)
    ):  # fmt: skip
        tried[name] = within_memory(size, lambda step=step: eager(size, model_of(size), step, batch, SGD))
        yield name, tried[name]
    compared = tried["checkpoint"]
    with torch.device("meta"):
        shapes = gpt.stack(gpt.Block, size.width, size.layers, size.vocabulary)
    operators = operators_on(size, shapes, step_in_bfloat16, batch)
    plan = gpt.even_plan_of(operators, size.microbatches, 1, size.stages[0])
    stages = range(len(plan.stages))
    rates = {c.to_host: c.line.bytes_per_s for c in host_copies(size.where) if c.pinned} or {True: 1e9, False: 1e9}
    yield "copies alone", {"to_host_bytes_per_s": rates[True], "to_device_bytes_per_s": rates[False]}
    seconds = compared["median_s"] / size.microbatches / len(stages) / 4  # of F; B takes twice that, RECOMPUTE once
    most = evolve(plan, memory=evolve(plan.memory, recompute=tuple(stages[len(stages) // 4 : -1])))
    for name, chosen in (
        ("recompute", evolve(plan, memory=evolve(plan.memory, recompute=tuple(stages)))),
        ("recompute and offload", offloaded(size, most, operators, seconds, min(rates.values()))),
    ):
        yield name, within_memory(size, lambda chosen=chosen: trained_within(size, chosen, batch, compared))


def within_memory(size: Size, train: Callable[[], Found]) -> Found:
    clear(size)
    try:
        return train()
    except torch.OutOfMemoryError as error:
        return {"failure": str(error).partition(".")[0]}


def offloaded(size: Size, plan: Plan, operators: Operators, forward_s: float, bytes_per_s: float) -> Plan:
    """The plan with as much offload as the link carries, of the stages that do not recompute."""
    count = len(plan.stages)
    compiled = compile_stages(operators, [stage.nodes for stage in plan.stages], range(count))
    storages = [
        () if i in plan.memory.recompute else offloadable_storages(i, compiled, plan.placement) for i in range(count)
    ]
    costs = [
        StageCosts(forward_s, forward_s, forward_s, saved_bytes=compiled.programs[i].memory.saved) for i in range(count)
    ]
    return with_offload(plan, offloadable(plan, costs, with_host(size.memory_bytes, bytes_per_s), storages), everything)


def with_host(memory_bytes: float, bytes_per_s: float) -> Cluster:
    """One device, and the memory of its host."""
    alone = fully_connected(1, memory_bytes, 1e9, 1e-6)
    return evolve(alone, hubs=(Hub("host", "host"),), links=(Link(alone.devices[0].name, "host", bytes_per_s, 1e-5),))


def trained_within(size: Size, plan: Plan, batch: Any, compared: Found) -> Found:
    memory = panpipe.Memory(offload_to="disk") if size.where.type == "cpu" else None
    pipe = pipeline_of(size, plan, model_of(size), step_in_bfloat16, batch, SGD, memory)
    with pipe:
        found = measured(size, partial(pipe.step, batch), compared)
        _, trace = pipe.trace_step(batch)
        return {**found, "recomputed stages": len(plan.memory.recompute), **copies_of(trace)}


def copies_of(trace: Trace) -> Found:
    """How fast the host copies of a step were, and which share of their time some device computed."""
    found, compute = Found(), computing(trace)
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        copies = [event for event in trace.events if event.action.kind is kind]
        if copies:
            own, size = spans(copies), sum(event.bytes for event in copies)
            found[str(kind)] = {
                "bytes": size, "bytes_per_s": size / max(sum(e - s for s, e in own), 1e-9),
                "during compute": share_during(own, compute),
            }  # fmt: skip
    return found


def spans(events: Iterable[TraceEvent]) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in events]


def computing(trace: Trace) -> list[tuple[float, float]]:
    return spans(event for event in trace.events if event.queue == COMPUTE_QUEUE)


def predictions(size: Size) -> Results:
    """Automatic plans of three models: predicted time and memory against measured."""
    for width in size.widths:
        clear(size)
        yield f"width {width}", predicted(evolve(size, width=width))


def predicted(size: Size) -> Found:
    """An automatic plan next to plain PyTorch."""
    batch, optimizer = batch_of(size), torch.optim.AdamW
    compared = eager(size, model_of(size), step_in_bfloat16, batch, optimizer)
    clear(size)
    started = time.perf_counter()
    with panpipe.pipeline(
        model_of(size), step_in_bfloat16, batch, optimizer=optimizer, microbatches=size.microbatches,
        devices=size.device, mesh="pp=1", plan=panpipe.Auto(cache=False), run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        planned_s, prediction = time.perf_counter() - started, pipe.plan.prediction
        assert prediction is not None
        clear(size)
        found = measured(size, partial(pipe.step, batch), compared)
        _, trace = pipe.trace_step(batch)
    saved = max((sample.bytes for sample in trace.memory if sample.kind == "saved"), default=0)
    return found | {
        "planned_s": planned_s, "step": against(prediction.step_s, found["median_s"]),
        "saved bytes": against(prediction.peak_saved_bytes[0], saved),
        "peak": against(prediction.peak_memory_bytes[0], found["peak_bytes"]),
    }  # fmt: skip


def against(predicted: float, found: float | None) -> Found:
    return {"predicted": predicted, "measured": found, "off_by_percent": found and 100 * (predicted / found - 1)}


def steps(size: Size) -> Results:
    """A GPT with 1, 2 and 4 stages on one device against plain PyTorch: one stage takes at most 3 % longer."""
    batch = batch_of(size)
    clear(size)
    compared = eager(size, model_of(size), step_in_bfloat16, batch)
    yield "eager", compared
    for stages in size.stages:
        clear(size)
        with pipeline_of(size, stages, model_of(size), step_in_bfloat16, batch) as pipe:
            found = measured(size, partial(pipe.step, batch), compared)
            _, trace = pipe.trace_step(batch)
        messages = spans(event for event in trace.events if event.action.peer is not None)
        yield f"{stages} stages", {**found, "messages during compute": share_during(messages, computing(trace))}


PARTS = {part.__name__: part for part in (offload, memory, predictions, steps)}


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
    results = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    }
    if size.where.type == "cuda":
        results["versions"] |= {
            "device": torch.cuda.get_device_name(size.where), "nccl": list(torch.cuda.nccl.version()),
        }  # fmt: skip
    for name, found in PARTS[options.part](size):
        results[name] = found
        print(json.dumps({name: found}), flush=True)
        (options.out / f"{options.part}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
