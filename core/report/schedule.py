"""The report of a schedule of uniform stages: its times and sizes are in the units of its costs."""

from collections.abc import Iterator
from operator import attrgetter

from attrs import evolve

from ..actions import Action, Kind
from ..plan.memory import held_bytes, order_changes
from ..plan.memory_policy import moved
from ..schedules.scored import Scored, costs_of
from ..trace.trace import (
    COMPUTE_QUEUE,
    HOST_COPY_QUEUE,
    MemorySample,
    Trace,
    TraceEvent,
    receive_queue,
    send_queue,
)
from .chart.steps import steps_svg
from .data import ReportFacts, report_data
from .page import page_of

SAVED = "saved"


def schedule_html(scored: Scored) -> str:
    """The page of a schedule. The same input gives the same bytes."""
    return page_of(schedule_data(scored))


def schedule_data(scored: Scored) -> dict[str, object]:
    """The data of its page; memory is in one device's saved tensors for one microbatch."""
    problem = scored.problem
    limits = () if problem.memory_limit is None else (problem.memory_limit / problem.chunks,) * problem.devices
    equal = "equal " if problem.costs is None or len(set(problem.costs)) == 1 else ""
    stages = f"{len(scored.schedule.placement)} {equal}stages"
    facts = ReportFacts(
        title=scored.schedule.name,
        summary=f"{stages} on {problem.devices} devices, {problem.microbatches} microbatches a step.",
        limits_bytes=limits,
        plain_units=True,
    )
    data = report_data(None, _steps(scored), None, facts)
    # Memory is taken from the curves: the answer to a slider's move should not wait for samples of a trace.
    curves = curves_of(scored)
    data["traces"][0]["memory"] = {
        "kinds": [SAVED],
        "times": [[round(time, 9) for time, _ in curve] for curve in curves],
        "held": [[[round(held, 6)] for _, held in curve] for curve in curves],
    }
    peaks = [peak / problem.chunks for peak in scored.result.peak_memory]
    data["peaks"] = {"kinds": [SAVED], "whole": True, "devices": [peaks]}
    return data


def schedule_svg(scored: Scored) -> str:
    """The picture of a schedule. Times keep its unit; memory is in one device's saved tensors for one microbatch."""
    result, problem = scored.result, scored.problem
    limit = None if problem.memory_limit is None else problem.memory_limit / problem.chunks
    text = (
        f"{problem.devices} devices · {problem.microbatches} microbatches · makespan {result.makespan:.6g} · bubble "
        f"{result.bubble_ratio:.1%} · peak {max(result.peak_memory) / problem.chunks:.4g}"
    )
    text += "" if limit is None else f" of at most {limit:.4g}"
    return steps_svg((schedule_trace(scored),), scored.schedule.name, text, limit)


def schedule_trace(scored: Scored) -> Trace:
    """The step of a schedule as a trace: compute, messages if they take time, copies to the host, and saved tensors."""
    memory = [
        MemorySample(device, time, SAVED, held)
        for device, curve in enumerate(curves_of(scored))
        for time, held in curve
    ]
    memory.sort(key=attrgetter("time_s"))
    return evolve(_steps(scored), memory=tuple(memory))


def _steps(scored: Scored) -> Trace:
    """The trace without memory."""
    events = [*_compute(scored), *_messages(scored), *_copies(scored)]
    events.sort(key=attrgetter("start_s", "device"))
    return Trace("simulated", "", scored.problem.devices, tuple(events), (), scored.result.makespan)


def _compute(scored: Scored) -> Iterator[TraceEvent]:
    result = scored.result
    for device, actions in enumerate(scored.schedule.device_actions):
        for action, start, end in zip(actions, result.starts[device], result.ends[device], strict=True):
            yield TraceEvent(device, COMPUTE_QUEUE, action, start, end)


def _messages(scored: Scored) -> Iterator[TraceEvent]:
    hop, placement = scored.problem.hop_s, scored.schedule.placement
    if hop == 0:
        return
    for event in _compute(scored):
        action = event.action
        forward = action.kind is Kind.F
        peer = action.stage + 1 if forward else action.stage - 1
        if action.kind is Kind.W or not 0 <= peer < len(placement) or placement[peer] == event.device:
            continue
        send = Action(action.stage, Kind.SEND_F if forward else Kind.SEND_B, action.microbatch, peer)
        times = event.end_s, event.end_s + hop
        yield TraceEvent(event.device, send_queue(placement[peer]), send, *times)
        yield TraceEvent(placement[peer], receive_queue(event.device), send.counterpart, *times)


def _copies(scored: Scored) -> Iterator[TraceEvent]:
    """Copies to the host and back, as the evaluation runs them."""
    for device, (copies, ends) in enumerate(zip(scored.copies, scored.result.copy_ends, strict=True)):
        actions = scored.schedule.device_actions[device]
        for copy, (out_end, back_end) in zip(copies, ends, strict=True):
            action = actions[copy.forward]
            for kind, end, took in ((Kind.OFFLOAD, out_end, copy.out_s), (Kind.RELOAD, back_end, copy.back_s)):
                moved = Action(action.stage, kind, action.microbatch)
                yield TraceEvent(device, HOST_COPY_QUEUE, moved, end - took, end)


def curves_of(scored: Scored) -> list[list[tuple[float, float]]]:
    """The saved tensors that each device holds from each time on: (time, held), times ascending and distinct; memory in
    one device's saved tensors for one microbatch."""
    result, costs, chunks = scored.result, costs_of(scored.problem), scored.problem.chunks
    copies = scored.copies or [()] * len(result.starts)
    curves = []
    for actions, starts, ends, own in zip(
        scored.schedule.device_actions, result.starts, result.ends, copies, strict=True
    ):
        curve = [(0.0, 0.0)]
        by_place = [held / chunks for held in held_bytes(order_changes(actions, costs), moved(own))]
        for start, end, running, after in zip(starts, ends, by_place[1::2], by_place[2::2], strict=True):
            # A reload allocates before the next action frees offloaded tensors.
            before = curve[-1][1] if own and curve[-1][0] == start else 0.0
            for moment, held in ((start, max(running, before)), (end, after)):
                if curve[-1][0] == moment:
                    curve[-1] = (moment, held)
                elif curve[-1][1] != held:
                    curve.append((moment, held))
        curves.append(curve)
    return curves
