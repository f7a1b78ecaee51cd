"""``panpipe simulate``: run a plan in the simulator."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.documents import as_plain
from ..core.errors import InfeasibleError, RequestError
from ..core.plan import read_plan
from .output import bytes_text, note, print_json, print_table, seconds_text

if TYPE_CHECKING:
    from ..simulators.result import SimulationResult


def simulate(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan with its prediction.", show_default=False)],
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace here.", metavar="FILE", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the HTML report here.", metavar="FILE.html", show_default=False)
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="A send needs no posted receive.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Run one step of a plan in the simulator: time, bubbles by cause, memory by kind, and links.

    Transfers that share a link share its bandwidth. A device that does not have the memory is told, and runs.
    """
    from ..core.validate import validate
    from ..simulators.run import simulate as run

    plan = read_plan(path)
    try:
        for warning in validate(plan).warnings:
            note(f"warning: {warning}")
    except InfeasibleError as error:
        note(f"does not fit: {error}")
    result = run(plan, eager=eager)
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


def _written(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give a path in a folder that exists") from None
    note(f"written to {path}")


def _answer(result: "SimulationResult") -> dict[str, Any]:
    return {
        "step_s": result.step_s,
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
        f"{plan.model or 'the plan'}: step {seconds_text(result.step_s)}, bubble {result.bubble_ratio:.1%}, "
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
