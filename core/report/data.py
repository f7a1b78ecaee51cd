"""The facts that a report shows in addition to its plan and traces, and the data that the page draws, as plain objects.
Times in seconds to the nanosecond, memory in bytes.
"""

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from attrs import evolve, field, frozen

from ..actions import BACKWARD_KINDS, COMPUTE_KINDS, Kind
from ..costs.module_names import module_ranges
from ..documents import as_plain
from ..offload.not_offloaded import NotOffloaded
from ..plan.plan import Plan
from ..policies.offload import host_slots
from ..schedules.meaning import short_name
from ..timing.idle import IdleTime, idle_data
from ..trace.compare import bubble_per_device, compare, memory_kinds, memory_rows, peak_memory
from ..trace.trace import HOST_MEMORY, LinkTrack, MemorySample, Trace, TraceEvent, queue_order
from ..wording import counted


class Checked(StrEnum):
    """The subject of a check."""

    RESULT = "result"
    """A computed value. If the check fails, the program has failed."""
    PREDICTION = "prediction"
    """A predicted value. If the check fails, the prediction missed, and the computed values are still right."""


@frozen
class Check:
    """One check with its outcome.

    Args:
        name: a few words: ``loss equals one process``.
        value: the outcome as text: ``0 of 0 bits differ``.
        verdict: True passed, False failed, None for a figure without a pass criterion.
        about: a result, or a prediction.
    """

    name: str
    value: str
    verdict: bool | None = None
    about: Checked = Checked.RESULT

    @property
    def failed(self) -> bool:
        """Whether a result is wrong."""
        return self.verdict is False and self.about is Checked.RESULT

    @property
    def missed(self) -> bool:
        """Whether a prediction missed."""
        return self.verdict is False and self.about is Checked.PREDICTION


@frozen
class ReportFacts:
    """Optional contents of the page; without a fact, its part of the page is omitted.

    Args:
        title: headline; None for the plan's model.
        summary: one or two sentences below it; None for a sentence about the plan.
        losses: loss of each training step, in order.
        reference_losses: losses of the same steps by one process, drawn over them.
        step_times_s: measured time of every timed step, in seconds; their median is the headline's measured time.
        one_process_step_s: time of the same step by one process, for the speed-up.
        limits_bytes: memory limit per device; None for the memory of the prediction's cluster.
        checks: checks with their outcomes.
        notes: sentences for the end of the page.
        idle: the idle time of the predicted step by cause.
        kept: saved tensors that stay on the devices of a plan that offloads.
        plain_units: whether times and sizes are in the unit of abstract costs, not in seconds and bytes.
    """

    title: str | None = None
    summary: str | None = None
    losses: tuple[float, ...] = field(default=(), converter=tuple)
    reference_losses: tuple[float, ...] = field(default=(), converter=tuple)
    step_times_s: tuple[float, ...] = field(default=(), converter=tuple)
    one_process_step_s: float | None = None
    limits_bytes: tuple[float, ...] | None = None
    checks: tuple[Check, ...] = field(default=(), converter=tuple)
    notes: Sequence[str] = ()
    idle: IdleTime | None = None
    kept: tuple[NotOffloaded, ...] = ()
    plain_units: bool = False


UNNAMED = "Pipeline plan"
"""Headline if neither the facts nor the plan have a name."""
OFFLOADED = "offloaded"
"""Name of the kind of memory that is on a host."""
TRACES = "Predicted and measured"
"""Headline if there is no plan."""


def report_data(plan: Plan | None, predicted: Trace, measured: Trace | None, facts: ReportFacts) -> dict[str, Any]:
    """All data of the page."""
    traces = [predicted] if measured is None else [predicted, measured]
    hosts = _hosts(plan, traces)
    digits = 6 if facts.plain_units else None
    interval = None if plan is None or plan.prediction is None else plan.prediction.interval_s
    return {
        "title": facts.title or (TRACES if plan is None else plan.model or UNNAMED),
        "units": "plain" if facts.plain_units else "SI",
        "summary": facts.summary or ("" if plan is None else _summary(plan)),
        "plan": _traced(predicted) if plan is None else _plan(plan),
        "queues": _queues(traces),
        "traces": [
            _trace(trace, name, hosts, digits) for trace, name in zip(traces, ("predicted", "measured"), strict=False)
        ],
        "step": _step(interval, predicted, measured, facts),
        "peaks": _peaks(traces),
        "limits": _limits(plan, facts),
        "hosts": [{key: host[key] for key in ("name", "limit", "arena")} for host in hosts],
        "kept": [as_plain(kept) for kept in facts.kept],
        # The charts have every action already.
        "comparison": None if measured is None else as_plain(evolve(compare(predicted, measured), actions=())),
        "idle": None if facts.idle is None else idle_data(facts.idle),
        "links": [_link(link) for link in predicted.links],
        "losses": _finite(facts.losses),
        "referenceLosses": _finite(facts.reference_losses),
        "stepTimes": _finite(facts.step_times_s),
        "checks": [as_plain(check) for check in facts.checks],
        "notes": list(facts.notes),
    }


def _summary(plan: Plan) -> str:
    stages = counted(len(plan.stages), "stage")
    devices = counted(plan.devices, "device")
    batches = f"{counted(plan.microbatches, 'microbatch')} a step"
    if plan.mesh.data > 1:
        batches = f"in {plan.mesh.data} replicas with {batches} each"
    order = short_name(plan.schedule)
    return f"{plan.model or 'The graph'} in {stages} on {devices}, {batches}, in the order of {order}."


def _link(link: LinkTrack) -> dict[str, Any]:
    """One link. Rates in bytes/s; a limit of None means that there is no limit."""
    return {
        "name": f"{link.src} → {link.dst}",
        "limit": link.bytes_per_s if math.isfinite(link.bytes_per_s) else None,
        "times": [round(time, 9) for time in link.times],
        "rates": [round(rate) for rate in link.rates],
    }


def _step(
    interval: tuple[float, float] | None, predicted: Trace, measured: Trace | None, facts: ReportFacts
) -> dict[str, Any]:
    """Step times; the measured one is the median of the timed steps, if there are any."""
    times = facts.step_times_s
    found = statistics.median(times) if times else None if measured is None else measured.step_s
    one = facts.one_process_step_s
    return {
        "predicted": predicted.step_s,
        "measured": found,
        "error": predicted.step_s / found - 1 if found else None,
        "interval": None if interval is None else list(interval),
        "fastest": min(times, default=None),
        "slowest": max(times, default=None),
        "timed": len(times),
        "speedup": one / (found or predicted.step_s) if one and (found or predicted.step_s) else None,
    }


def _queues(traces: Sequence[Trace]) -> list[list[str]]:
    """Per device the queues of all traces together, so that both charts have the same rows."""
    count = max(trace.devices for trace in traces)
    found: list[set[str]] = [set() for _ in range(count)]
    for trace in traces:
        for event in trace.events:
            found[event.device].add(event.queue)
    return [sorted(queues, key=lambda queue: (queue_order(queue), queue)) for queues in found]


def _trace(trace: Trace, name: str, hosts: Sequence[dict[str, Any]], digits: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "step": trace.step_s,
        "events": _columns(trace.events),
        "phases": _phases(trace),
        "bubbles": list(bubble_per_device(trace)),
        "memory": _memory(trace, memory_kinds(trace), digits),
        "host": _host_memory(trace, hosts),
    }


def _columns(events: Sequence[TraceEvent]) -> dict[str, list[Any]]:
    """Events column by column: a third of the size of a list of objects."""
    actions = [event.action for event in events]
    return {
        "device": [event.device for event in events],
        "queue": [event.queue for event in events],
        "kind": [action.kind.value for action in actions],
        "stage": [action.stage for action in actions],
        "microbatch": [action.microbatch for action in actions],
        "peer": [action.peer for action in actions],
        "start": [round(event.start_s, 9) for event in events],
        "end": [round(event.end_s, 9) for event in events],
        "bytes": [round(event.bytes) for event in events],
    }


def _phases(trace: Trace) -> list[dict[str, float] | None]:
    """Per device: warm-up lasts until its first backward, cool-down begins when its last forward ends."""
    first, last, ends = [math.inf] * trace.devices, [-math.inf] * trace.devices, [0.0] * trace.devices
    for event in trace.events:
        device, kind = event.device, event.action.kind
        ends[device] = max(ends[device], event.end_s)
        if kind is Kind.F:
            last[device] = max(last[device], event.end_s)
        elif kind in BACKWARD_KINDS:
            first[device] = min(first[device], event.start_s)
    return [
        {"warm": round(warm, 9), "cool": round(max(warm, cool), 9), "end": round(end, 9)}
        if math.isfinite(warm) and math.isfinite(cool)
        else None
        for warm, cool, end in zip(first, last, ends, strict=True)
    ]


def _host_memory(trace: Trace, hosts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per host the offloaded bytes of its devices together, as a trace of one kind of memory per host."""
    numbers = {device: number for number, host in enumerate(hosts) for device in host["devices"]}
    held: dict[int, float] = {}
    samples = []
    for sample in trace.memory:
        if sample.kind == HOST_MEMORY:
            held[sample.device] = sample.bytes
            host = numbers[sample.device]
            total = sum(held.get(device, 0.0) for device in hosts[host]["devices"])
            samples.append(MemorySample(host, sample.time_s, OFFLOADED, total))
    memory = evolve(trace, devices=len(hosts), memory=tuple(samples))
    return _memory(memory, (OFFLOADED,) if samples else ())


def _memory(trace: Trace, kinds: Sequence[str], digits: int | None = None) -> dict[str, Any]:
    """Per device one row of held bytes, by kind, for every time at which one of them changes; whole bytes, or a size in
    plain units with ``digits`` after the point.

    Rows of times less than a nanosecond apart are kept, with the same time: a peak may be between them.
    """
    rows = memory_rows(trace, kinds)
    return {
        "kinds": list(kinds),
        "times": [[round(time_s, 9) for time_s, _ in own] for own in rows],
        "held": [[[round(size, digits) for size in held] for _, held in own] for own in rows],
    }


def _peaks(traces: Sequence[Trace]) -> dict[str, Any]:
    """Peak per device, over the kinds that every trace with samples has, so that the two are comparable."""
    known = [set(kinds) for kinds in map(memory_kinds, traces) if kinds]
    if not known:
        return {"kinds": [], "devices": []}
    common = [
        kind for kind in memory_kinds(traces[0] if traces[0].memory else traces[-1]) if kind in set.intersection(*known)
    ]
    columns = [[row["total"] for row in peak_memory(trace, common)] if trace.memory else None for trace in traces]
    return {"kinds": common, "whole": all(set(common) == kinds for kinds in known), "devices": columns}


def _limits(plan: Plan | None, facts: ReportFacts) -> list[float]:
    if facts.limits_bytes is not None:
        return list(facts.limits_bytes)
    if plan is None or plan.prediction is None:
        return []
    return [device.memory_bytes for device in plan.mesh.arrange(plan.prediction.cluster).devices[: plan.mesh.ranks]]


def _traced(trace: Trace) -> dict[str, Any]:
    """The page's data of a plan, from a trace alone."""
    compute = [event for event in trace.events if event.action.kind in COMPUTE_KINDS]
    stages = {event.action.stage: event.device for event in compute}
    return {
        "known": False,
        "hash": trace.plan_hash,
        "devices": trace.devices,
        "replicas": 1,
        "held": [sorted(stage for stage in stages if stages[stage] == device) for device in range(trace.devices)],
        "stages": [{"index": stage, "device": stages[stage]} for stage in sorted(stages)],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    costs = plan.prediction.costs if plan.prediction is not None else None
    modules = module_ranges([stage.nodes for stage in plan.stages])
    stages = [
        {
            "index": stage.index,
            "device": stage.device,
            "modules": modules[stage.index],
            "operators": len(stage.nodes),
            "parameters": len(stage.parameters),
            "parameterBytes": costs[stage.index].parameter_bytes if costs else None,
            "savedBytes": costs[stage.index].saved_bytes if costs else None,
            "forward": costs[stage.index].forward_s if costs else None,
            "backward": costs[stage.index].full_backward_s if costs else None,
        }
        for stage in plan.stages
    ]
    return {
        "known": True,
        "model": plan.model,
        "schedule": plan.schedule,
        "hash": plan.hash,
        "devices": plan.devices,
        "replicas": plan.mesh.data,
        "held": [[stage.index for stage in plan.stages_on(rank % plan.devices)] for rank in range(plan.mesh.ranks)],
        "microbatches": plan.microbatches,
        "stages": stages,
        "edges": [as_plain(edge) for edge in plan.edges],
        "tied": [as_plain(tied) for tied in plan.tied],
        "recompute": list(plan.memory.recompute),
        "offload": [
            {"stage": each.stage, "bytes": each.bytes, "storages": len(each.storages), "microbatches": len(each.copies)}
            for each in plan.memory.offload
        ],
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """Replace infinite and NaN values by None: a gap in the curve, and valid JSON."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _hosts(plan: Plan | None, traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """The hosts that devices offload to, in the order of their first device, each with the bytes that plans may offload
    to it and its devices' arenas; None where they are not known.

    Which devices share a host is only known from a plan with a cluster; otherwise each device has a host of its own.
    """
    devices = sorted({sample.device for trace in traces for sample in trace.memory if sample.kind == HOST_MEMORY})
    if not devices or plan is None or plan.prediction is None:
        return [{"name": f"host of device {d}", "devices": [d], "limit": None, "arena": None} for d in devices]
    cluster = plan.mesh.arrange(plan.prediction.cluster)
    found: dict[str, dict[str, Any]] = {}
    for device in devices:
        host = cluster.host_of(device)
        unused: dict[str, Any] = {"name": host.name, "devices": [], "limit": host.memory_bytes, "arena": 0}
        own = found.setdefault(host.name, unused)
        own["devices"].append(device)
        own["arena"] += host_slots(plan, device % plan.devices).bytes
    return list(found.values())
