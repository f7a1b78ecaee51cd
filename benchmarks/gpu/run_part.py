"""One part of the first minutes on a GPU: python benchmarks/gpu/run_part.py PART [--out FOLDER] [--toy].

Memory, predictions and steps next to plain PyTorch, and copies to the host. ``lease.sh`` runs the parts, each in a
process of its own with a limit of its own. What a part has found is printed and written to ``FOLDER/PART.json`` as soon
as it is known, with the versions. ``--toy`` runs a part at toy size, on the CPU where there is no GPU, with the same
code except what only a GPU has: ``make test`` does, so that the first run on a GPU is not the first.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import panpipe
import torch
from attrs import evolve
from panpipe.core.actions import Kind
from panpipe.core.capture.export.operators import Operators
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

from benchmarks import gpt
from benchmarks.gpu.workload import (
    TOY,
    Found,
    Size,
    batch_of,
    clear,
    eager,
    measured,
    model_of,
    operators_on,
    pipeline_of,
    plan_of,
    share_during,
    step_in_bfloat16,
)

Results = Iterator[tuple[str, Found]]
"""What a part has found so far, by name: it is written at once, so that a part that is stopped keeps it."""
SGD = partial(torch.optim.SGD, lr=0.1)


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
    plan = plan_of(operators, size.microbatches, 1, size.stages[0])
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
    found, compute = Found(), spans(trace, computes)
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        copies = [event for event in trace.events if event.action.kind is kind]
        if copies:
            own = [(event.start_s, event.end_s) for event in copies]
            found[str(kind)] = {
                "bytes": sum(event.bytes for event in copies),
                "bytes_per_s": sum(event.bytes for event in copies) / max(sum(e - s for s, e in own), 1e-9),
                "during compute": share_during(own, compute),
            }
    return found


def computes(event: TraceEvent) -> bool:
    return event.queue == COMPUTE_QUEUE


def spans(trace: Trace, wanted: Callable[[TraceEvent], bool]) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in trace.events if wanted(event)]


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
        yield f"{stages} stages", step_of_stages(size, stages, compared)


def step_of_stages(size: Size, stages: int, compared: Found) -> Found:
    batch = batch_of(size)
    with pipeline_of(size, stages, model_of(size), step_in_bfloat16, batch) as pipe:
        found = measured(size, partial(pipe.step, batch), compared)
        _, trace = pipe.trace_step(batch)
    messages = spans(trace, lambda event: event.action.peer is not None)
    return {**found, "messages during compute": share_during(messages, spans(trace, computes))}


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
