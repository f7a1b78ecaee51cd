"""Parts of ``run_part.py`` that train: memory, predictions, steps and graphs, each next to plain PyTorch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import panpipe
import torch
from attrs import evolve
from panpipe.answers.kernel_profile import model_samples
from panpipe.answers.profile_operators import described_device
from panpipe.core.actions import Kind
from panpipe.core.analytic.calibration import Sample, calibrate
from panpipe.core.analytic.model import ModelWork, model_work
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
from panpipe.runtimes.profile.operator_profile import profile_operators
from panpipe.runtimes.programs.compiled import compile_stages
from panpipe.runtimes.programs.graphs import graph_pool
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks import gpt
from benchmarks.gpu.workload import (
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


# (a) and (f): a model that exceeds the memory


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


# (b) and (c): predictions


def predictions(size: Size) -> Results:
    """Automatic plans of three models: predicted time and memory against measured.

    The analytic model is calibrated on the operators of the first two, and predicts the step of the third.
    """
    samples: list[Sample] = []
    for width in size.widths:
        clear(size)
        found, work, own = predicted(evolve(size, width=width))
        yield f"width {width}", found
        if width != size.widths[-1]:
            samples += own
    fitted = calibrate(samples, described_device(None, size.where.type))
    graph = work.on(fitted.device)
    microbatch_s = sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in graph.nodes)
    predicted_s = size.microbatches * microbatch_s + sum(node.optimizer_s for node in graph.nodes)
    step = against(predicted_s, found["median_s"])
    yield "analytic model", {f"step of width {width}": step, "error of operators": fitted.median_error}


def predicted(size: Size) -> tuple[Found, ModelWork, list[Sample]]:
    """An automatic plan next to plain PyTorch; the kernels of the step's operators, and their measured times."""
    batch, optimizer = batch_of(size), torch.optim.AdamW
    compared = eager(size, model_of(size), step_in_bfloat16, batch, optimizer)
    clear(size)
    model = model_of(size)
    work, samples = operator_samples(size, model, batch)
    started = time.perf_counter()
    with panpipe.pipeline(
        model, step_in_bfloat16, batch, optimizer=optimizer, microbatches=size.microbatches, devices=size.device,
        mesh="pp=1", plan=panpipe.Auto(cache=False), run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        planned_s, prediction = time.perf_counter() - started, pipe.plan.prediction
        assert prediction is not None
        clear(size)
        found = measured(size, partial(pipe.step, batch), compared)
        _, trace = pipe.trace_step(batch)
    saved = max((sample.bytes for sample in trace.memory if sample.kind == "saved"), default=0)
    found |= {
        "planned_s": planned_s, "step": against(prediction.step_s, found["median_s"]),
        "saved bytes": against(prediction.peak_saved_bytes[0], saved),
        "peak": against(prediction.peak_memory_bytes[0], found["peak_bytes"]),
    }  # fmt: skip
    return found, work, samples


def operator_samples(size: Size, model: nn.Module, batch: Any) -> tuple[ModelWork, list[Sample]]:
    """The kernels of the step's operators, and their measured times."""
    operators = operators_on(size, model, step_in_bfloat16, batch)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    piece = [tensor[: size.rows // size.microbatches].to(size.where) for tensor in batch]
    work = model_work(operators)
    return work, model_samples(work, profile_operators(operators, parameters, buffers, piece, device=size.where))


def against(predicted: float, found: float | None) -> Found:
    return {"predicted": predicted, "measured": found, "off_by_percent": found and 100 * (predicted / found - 1)}


# (d): steps


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


# (e): graphs


@contextmanager
def graphs_of(size: Size) -> Iterator[None]:
    """A context in which the device has graphs: on the CPU those of the tests, which repeat recorded operators."""
    if size.where.type != "cpu":
        yield
        return
    from panpipe.tests.support.backends.fake_graphs import FakeGraphPool

    with mock.patch.dict(graph_pool._KINDS, {"cpu": FakeGraphPool}):
        yield


def graphs(size: Size) -> Results:
    """A GPT of two stages without graphs and with: times, memory, and whether the bits after the steps are equal.

    Kernels that add in any order (``atomicAdd``, as in the backward of an embedding) may give other bits in every run,
    with graphs and without: the largest distance is recorded, too.
    """
    with graphs_of(size):
        clear(size)
        without, wanted = steps_of_two(size, graphed=False)
        yield "without", without
        clear(size)
        graphed, tensors = steps_of_two(size, without, graphed=True)
        yield "graphs", graphed
    pairs = list(zip(wanted, tensors, strict=True))
    bits = all(torch.equal(one, other) for one, other in pairs)
    yield "equal", {"bits": bits, "apart": max(float((one - other).abs().max()) for one, other in pairs)}


def steps_of_two(size: Size, compared: Found | None = None, *, graphed: bool) -> tuple[Found, list[torch.Tensor]]:
    """Steps of two stages, and the loss and the parameters after them, on the host."""
    batch, issued = batch_of(size), list[float]()
    with pipeline_of(size, 2, model_of(size), step_in_bfloat16, batch, SGD, cuda_graphs=graphed) as pipe:
        found = measured(size, partial(pipe.step, batch), compared)
        for _ in range(size.steps):
            start = time.perf_counter()
            loss = pipe.step(batch)
            issued.append(time.perf_counter() - start)
            loss.isfinite().item()  # the device is idle
        tensors = [tensor.detach().float().cpu() for tensor in (loss, *pipe._session.model.parameters())]
    return {**found, "issued_s": min(issued)}, tensors


PARTS = (memory, predictions, steps, graphs)
