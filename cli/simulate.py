"""``panpipe simulate``: run a plan in the simulator."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ..answers.options import argument, flag, json_flag, option
from ..answers.output import (
    check_writable,
    note,
    print_json,
    print_records,
    print_table,
    seconds_text,
    share_text,
    write_noted,
)
from ..answers.plan_files import PlanFile, read_plan_or_schedule
from ..answers.step_tables import idle_of, print_devices, print_idle
from ..answers.uniform import equal_stages, uniform_times
from ..core.cluster.catalog.find import find_cluster
from ..core.cluster.cluster import Cluster, fully_connected
from ..core.costs.costs import StageCosts
from ..core.documents import as_plain
from ..core.errors import InfeasibleError, RequestError, naming
from ..core.files.limits import check_seconds
from ..core.lowering.derive import forward_only
from ..core.plan.plan import Plan
from ..core.plan.wording import plan_size
from ..core.report.data import ReportFacts
from ..core.report.page import report_html
from ..core.schedules.meaning import short_name
from ..core.timing.idle import IdleTime, idle_data
from ..core.trace.perfetto import trace_json
from ..core.trace.trace import Trace
from ..core.validation.interval import interval_of, interval_text
from ..simulators.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult


_NO_LIMIT = 1 << 62
"""Bytes of each device of a schedule file, which names none."""
SAVED = "one device's saved tensors for one microbatch"
BUSIEST_LINKS = 16
"""Most links that are printed; ``--json`` has all."""


def simulate(
    path: Path = argument(
        "A plan with its prediction, or a schedule file of torch.distributed.pipelining for equal stages.", ...,
        metavar="PLAN-OR-CSV",
    ),
    cluster: str | None = option(
        "Plans: another cluster than the plan's, by name (see panpipe catalog) or file; the plan's costs are kept."
    ),
    trace: Path | None = option("Write a Perfetto trace here.", metavar="FILE"),
    report: Path | None = option("Write the HTML report here.", metavar="FILE.html"),
    eager: bool = flag("A send needs no posted receive.", "--eager"),
    forwards: bool = flag("Simulate an evaluation, as pipe.evaluate: only the forwards.", "--forward-only"),
    optimizer: OptimizerStep | None = option(
        "What an optimizer step waits for after its own gradients; by default as in the plan."
    ),
    forward: float | None = option("Schedule files: seconds of a device's F for one microbatch, over all its chunks."),
    backward_input: float | None = option("Schedule files: the same for I, the input-gradient half of a backward."),
    backward_weight: float | None = option("Schedule files: the same for W, the weight-gradient half."),
    comm: float | None = option("Schedule files: seconds of a message between two devices."),
    json: bool = json_flag(),
) -> None:  # fmt: skip
    """Run one step of a plan in the simulator: time, bubbles by cause, memory by kind, and links.

    Transfers that share a link share its bandwidth. A device that runs out of memory is reported; the simulation
    continues. A host that cannot hold what is offloaded to it is refused: training would not start.

    A schedule file has no costs: its stages are equal, each F, I and W takes 1 second per device, and messages take no
    time, unless options set other times. Memory is in one device's saved tensors for one microbatch; in --json a
    stage's count as 1 byte.

    With --forward-only nothing is saved, reduced or stepped; a stage's F takes the same time as in training.
    """
    from ..core.validation.host_memory import check_host_memory
    from ..core.validation.structure import check_structure
    from ..core.validation.validate import check_actions, check_resources
    from ..simulators.run import simulate as run

    check_writable(trace, report)
    file = read_plan_or_schedule(path)
    with naming(path, *([] if cluster is None else [cluster])):
        plan = file.plan if cluster is None else _moved(file, find_cluster(cluster))
    given = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight, "comm": comm}
    with naming(path):
        costs, machine = _equal_stages(file, {name: value for name, value in given.items() if value is not None})
    lowered = file.lowered
    if forwards:
        with naming(path):
            check_structure(plan)
        plan, lowered = _forwards(plan, optimizer), None
    with naming(path, *([] if cluster is None else [cluster])):
        checked = check_actions(plan, lowered)
        if plan.prediction is not None:
            check_host_memory(plan, plan.mesh.arrange(plan.prediction.cluster))
        try:
            for warning in check_resources(checked).warnings:
                note(f"warning: {warning}")
        except InfeasibleError as error:
            note(f"does not fit: {error}")
        result = run(plan, costs, machine, eager=eager, optimizer=optimizer, lowered=lowered, checked=checked)
    idle = idle_of(result)
    write_noted(trace, lambda: trace_json(result.trace))
    write_noted(report, lambda: _report(file, plan, result, idle))
    if json:
        print_json({**_answer(result, idle), "interval_s": interval_of(plan.prediction, result.step_s)})
    else:
        _print(result, idle, None if file.is_schedule else [device.memory_bytes for device in result.devices])


def _report(file: PlanFile, plan: Plan, result: "SimulationResult", idle: IdleTime) -> str:
    """The report; times and sizes of a schedule file have no units."""
    if not file.is_schedule:
        return report_html(plan=plan, predicted=result.trace, facts=ReportFacts(idle=idle, kept=result.kept))
    summary = f"The schedule file {plan.model}: {plan_size(plan)}. Memory is in {SAVED}."
    facts = ReportFacts(title=plan.model, summary=summary, idle=idle, plain_units=True)
    return report_html(plan=None, predicted=_in_saved_tensors(result), facts=facts)


def _in_saved_tensors(result: "SimulationResult") -> Trace:
    """The trace of a schedule file's equal stages, with memory in one device's saved tensors for one microbatch."""
    held, trace = Counter(result.plan.placement), result.trace
    memory = (evolve(each, bytes=each.bytes / held[each.device]) for each in trace.memory if each.kind == "saved")
    return evolve(trace, memory=tuple(memory), events=tuple(evolve(event, bytes=0) for event in trace.events))


def _moved(file: PlanFile, cluster: Cluster) -> Plan:
    """The plan on another cluster, with the memory and the links of that cluster."""
    prediction = file.plan.prediction
    if file.is_schedule or prediction is None:
        raise RequestError("--cluster is for plans with a prediction, which has the costs: leave it out")
    file.plan.mesh.arrange(cluster)
    return evolve(file.plan, prediction=evolve(prediction, cluster=cluster))


def _forwards(plan: Plan, optimizer: OptimizerStep | None) -> Plan:
    """The plan of the forwards alone, with the costs and the cluster of the whole one."""
    if optimizer is not None:
        raise RequestError(
            f"--optimizer is {optimizer.value} with --forward-only: an evaluation has no optimizer step; leave one out"
        )
    return evolve(forward_only(plan), prediction=plan.prediction)


def _equal_stages(
    file: PlanFile, given: dict[str, float]
) -> tuple[tuple[StageCosts, ...], Cluster] | tuple[None, None]:
    """Costs and cluster of a schedule file's equal stages; None for a plan, which has its own."""
    if not file.is_schedule:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise RequestError(f"{option} is for schedule files, and the plan has its own costs: leave it out")
        return None, None
    for name, value in given.items():
        check_seconds("--" + name.replace("_", "-"), value)
    times = uniform_times(
        given.get("forward", 1), given.get("backward_input", 1), given.get("backward_weight", 1), freed=0
    )
    plan = file.plan
    cluster = fully_connected(plan.devices, _NO_LIMIT, float("inf"), given.get("comm", 0))
    return equal_stages(plan.placement, times), cluster


def _answer(result: "SimulationResult", idle: IdleTime) -> dict[str, Any]:
    return {
        "step_s": result.step_s,
        "stage_span_s": result.stage_span_s,
        "bubble_ratio": result.bubble_ratio,
        "busy_s": list(result.busy_s),
        "bubbles_s": list(result.bubbles),
        "peak_memory_bytes": list(result.peak_memory_bytes),
        "peak_saved_bytes": list(result.peak_saved_bytes),
        "peak_by_kind_bytes": list(result.peak_by_kind),
        "peak_actions": [None if action is None else str(action) for action in result.peak_actions],
        "memory_at_peak_bytes": list(result.memory_at_peak),
        "links": as_plain(result.links),
        "hosts": as_plain(result.hosts),
        "kept": as_plain(result.kept),
        "host_copies": [{**as_plain(use), "bytes_per_s": use.bytes_per_s} for use in result.host_copies],
        "idle": idle_data(idle),
    }


def _print(result: "SimulationResult", idle: IdleTime, limits: Sequence[int] | None) -> None:
    plan = result.plan
    step = f"{seconds_text(result.step_s)}{interval_text(plan.prediction)}"
    print(
        f"{plan.model or 'the plan'}: {'forwards' if plan.forward_only else 'step'} {step}, "
        f"stage span {seconds_text(result.stage_span_s)}, bubble {result.bubble_ratio:.1%}, "
        f"{plan_size(plan)}{'' if plan.schedule == plan.model else f', {short_name(plan.schedule)}'}"
    )
    if limits is None:
        print("Stages are equal: F, I and W of a device take 1 s each where no option sets another time.")
    _print_bubbles(result)
    if limits is None:  # a schedule file has neither bytes nor rates
        stages = Counter(plan.placement)
        print_records(
            f"Memory, in {SAVED}", range(plan.devices),
            {"device": str, "peak memory": lambda device: result.peak_saved_bytes[device] / stages[device]},
        )  # fmt: skip
    else:
        print_devices(result, limits)
        _print_hosts(result)
        _print_links(result)
    print_idle(idle)


def _print_bubbles(result: "SimulationResult") -> None:
    parts = [
        {"compute": busy, "update": max(result.step_s - busy - sum(idle.values()), 0.0), **idle}
        for busy, idle in zip(result.busy_s, result.bubbles, strict=True)
    ]
    shown = [part for part in parts[0] if any(share_text(own[part], result.step_s) != "0.0%" for own in parts)]
    rows = [
        (str(device), *(share_text(own[part], result.step_s) for part in shown)) for device, own in enumerate(parts)
    ]
    print_table("What each device does, and waits for, in shares of the step", ("device", *shown), rows)


def _print_hosts(result: "SimulationResult") -> None:
    """Memory of the hosts that devices offload to, and the copies; nothing for a plan without offload."""
    if not result.host_copies:
        return
    print_records(
        "Offloaded tensors in host memory", result.hosts,
        {"host": "host", "devices": lambda use: ", ".join(map(str, use.devices)), "peak": "peak_bytes B",
         "arenas": "arena_bytes B", "limit": "limit_bytes B"},
    )  # fmt: skip
    print_records(
        "Copies between devices and hosts", result.host_copies,
        {"device": lambda use: f"{use.device} {use.direction}", "copies": "count", "moved": "bytes B",
         "busy": lambda use: share_text(use.seconds, result.step_s), "rate": "bytes_per_s B/s"},
    )  # fmt: skip
    columns = {"stage": "stage", "microbatches": "microbatches", "of each": "bytes B", "why": "reason"}
    print_records("Saved tensors that stay on the device", result.kept, columns, texts=("why",))


def _print_links(result: "SimulationResult") -> None:
    links, title = sorted(result.links, key=lambda use: -use.utilisation), "Links"
    if len(links) > BUSIEST_LINKS:
        title = f"Links, the {BUSIEST_LINKS} busiest of {len(links)}"
    print_records(
        title, links[:BUSIEST_LINKS],
        {"link": lambda use: f"{use.src} → {use.dst}", "moved": "bytes B", "rate": "bytes_per_s B/s",
         "use": "utilisation %"},
    )  # fmt: skip
