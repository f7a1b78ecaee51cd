"""``panpipe simulate``: run a plan in the simulator."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.actions import Kind
from ..core.cluster import Cluster, fully_connected
from ..core.costs import StageCosts
from ..core.documents import as_plain
from ..core.errors import InfeasibleError, RequestError
from ..simulators.optimizer import OptimizerStep
from .output import bytes_text, note, print_json, print_table, seconds_text
from .plan_files import PlanFile, read_plan_or_schedule
from .uniform import equal_stages, uniform_times

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult


def _of_file(text: str) -> Any:
    """An option that describes the equal stages of a schedule file."""
    return typer.Option(help=f"Schedule files: {text}", show_default=False, min=0)


def simulate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN-OR-CSV",
            help="A plan with its prediction, or a schedule file of torch.distributed.pipelining for equal stages.",
            show_default=False,
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace here.", metavar="FILE", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the HTML report here.", metavar="FILE.html", show_default=False)
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="A send needs no posted receive.")] = False,
    optimizer: Annotated[
        OptimizerStep, typer.Option(help="What an optimizer step waits for, beside its own gradients.")
    ] = OptimizerStep.LOCAL,
    forward: Annotated[
        float | None, _of_file("seconds of a device's F for one microbatch, over all its chunks.")
    ] = None,
    backward_input: Annotated[float | None, _of_file("the same of I, the input-gradient half of a backward.")] = None,
    backward_weight: Annotated[float | None, _of_file("the same of W, the weight-gradient half.")] = None,
    comm: Annotated[float | None, _of_file("seconds of a hop between two devices.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Run one step of a plan in the simulator: time, bubbles by cause, memory by kind, and links.

    Transfers that share a link share its bandwidth. A device that does not have the memory is told, and runs.

    A schedule file holds no costs: its stages are equal, each F, I and W takes 1 second a device and messages nothing,
    unless the options say otherwise; a stage's saved tensors for one microbatch count as 1 byte.
    """
    from ..core.validate import validate
    from ..simulators.run import simulate as run

    file = read_plan_or_schedule(path)
    plan = file.plan
    given = {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
        "comm": comm,
    }
    costs, cluster = _equal_stages(file, {name: value for name, value in given.items() if value is not None})
    try:
        for warning in validate(plan, lowered=file.lowered).warnings:
            note(f"warning: {warning}")
    except InfeasibleError as error:
        note(f"does not fit: {error}")
    result = run(plan, costs, cluster, eager=eager, optimizer=optimizer, lowered=file.lowered)
    if trace is not None:
        from ..core.perfetto import write_trace

        _written(trace, lambda: write_trace(result.trace, trace))
    if report is not None:
        from ..core.report import write_report

        _written(report, lambda: write_report(report, plan=plan, predicted=result.trace))
    if json:
        print_json(_answer(result))
    else:
        _print(result)


def _equal_stages(
    file: PlanFile, given: dict[str, float]
) -> tuple[tuple[StageCosts, ...], Cluster] | tuple[None, None]:
    """Costs and cluster of a schedule file's equal stages; a plan brings its own."""
    if not file.is_schedule:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise RequestError(f"{option} is for schedule files: the plan holds its costs; leave it out")
        return None, None
    times = uniform_times(
        given.get("forward", 1), given.get("backward_input", 1), given.get("backward_weight", 1), freed=0
    )
    plan = file.plan
    most = max(sum(action.kind is Kind.F for action in actions) for actions in plan.device_actions)
    cluster = fully_connected(plan.devices, most, float("inf"), given.get("comm", 0))
    return equal_stages(plan.placement, times), cluster


def _written(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give a path in a folder that exists") from None
    note(f"written to {path}")


def _answer(result: "SimulationResult") -> dict[str, Any]:
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
        "links": as_plain(result.links),
    }


def _print(result: "SimulationResult") -> None:
    plan = result.plan
    print(
        f"{plan.model or 'the plan'}: step {seconds_text(result.step_s)}, "
        f"stage span {seconds_text(result.stage_span_s)}, bubble {result.bubble_ratio:.1%}, "
        f"{len(plan.stages)} stages on {plan.devices} devices, {plan.microbatches} microbatches, {plan.schedule}"
    )
    _print_bubbles(result)
    _print_memory(result)
    _print_links(result)


def _print_bubbles(result: "SimulationResult") -> None:
    causes = list(result.bubbles[0])
    rows = [
        (
            f"{device} {result.cluster.devices[device].name}",
            _share(result.busy_s[device], result.step_s),
            *(_share(idle[cause], result.step_s) for cause in causes),
        )
        for device, idle in enumerate(result.bubbles)
    ]
    print_table("Time, and bubbles by cause", ("device", "compute", *causes), rows)


def _print_memory(result: "SimulationResult") -> None:
    kinds = list(result.peak_by_kind[0])
    rows = [
        (
            f"{device} {result.cluster.devices[device].name}",
            *(bytes_text(size) for size in peaks.values()),
            bytes_text(result.peak_memory_bytes[device]),
            str(result.peak_actions[device] or "–"),
            bytes_text(result.cluster.devices[device].memory_bytes),
        )
        for device, peaks in enumerate(result.peak_by_kind)
    ]
    print_table("Peak memory of each kind", ("device", *kinds, "together", "at", "has"), rows)


def _print_links(result: "SimulationResult") -> None:
    rows = [
        (f"{use.src} → {use.dst}", bytes_text(use.bytes), f"{bytes_text(use.bytes_per_s)}/s", f"{use.utilisation:.1%}")
        for use in result.links
    ]
    print_table("Links", ("link", "moved", "rate", "utilisation"), rows)


def _share(time_s: float, step_s: float) -> str:
    return f"{time_s / step_s:.1%}" if step_s else "–"
