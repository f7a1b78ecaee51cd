"""``panpipe compare TRACE TRACE``: predicted against measured, action by action."""

from collections.abc import Sequence
from pathlib import Path

from ..answers.options import argument, json_flag, option
from ..answers.output import bytes_text, check_writable, note, print_json, print_table, seconds_text
from ..core.documents import as_plain
from ..core.errors import RequestError, naming
from ..core.files.write import write_text
from ..core.lowering.derive import forward_only
from ..core.plan.plan import read_plan
from ..core.trace.compare import TOTAL, Comparison, KindSummary, Offset, TransferSummary, worst_actions
from ..core.trace.compare import compare as compare_traces
from ..core.trace.perfetto_reader import read_trace
from ..core.validation.structure import check_structure
from ..core.wording import counted

SHOWN = 5
"""Most single differences that are printed; ``--json`` has all."""


def compare(
    predicted: Path = argument("Trace of the prediction.", ...),
    measured: Path = argument("Trace of the measurement.", ...),
    plan: Path | None = option("The plan of both traces, for the report."),
    report: Path | None = option("Write an HTML report of both here.", metavar="FILE.html"),
    svg: Path | None = option("Write a drawing of both here.", metavar="FILE.svg"),
    json: bool = json_flag("Print only JSON, with every action."),
) -> None:
    """Compare a predicted trace with a measured one, action by action.

    Errors are predicted ÷ measured − 1: above 0 the prediction was too slow or too large.
    """
    check_writable(report, svg)
    if plan is not None and report is None:
        raise RequestError(f"--plan {plan} is for the report: also give --report FILE.html")
    traces = read_trace(predicted), read_trace(measured)
    ran = None
    if plan is not None:
        given = read_plan(plan)
        with naming(plan):
            check_structure(given)
        ran = next((one for one in (given, forward_only(given)) if one.hash == traces[0].plan_hash), None)
        if ran is None:
            raise RequestError(f"{predicted} is of another plan than {plan}: give the plan that was simulated")
    comparison = compare_traces(*traces)
    if not comparison.same_plan:
        note("the two traces ran different plans: only actions of equal names are compared")
    if report is not None:
        from ..core.report.page import report_html

        with naming(*([] if plan is None else [plan])):
            page = report_html(plan=ran, predicted=traces[0], measured=traces[1])
        write_text(report, page)
        note(f"written to {report}")
    if svg is not None:
        from ..core.report.chart.steps import steps_svg

        write_text(svg, steps_svg(traces, predicted.stem if ran is None else ran.schedule))
        note(f"written to {svg}")
    if json:
        print_json(as_plain(comparison))
    else:
        _print(comparison)


def _print(comparison: Comparison) -> None:
    step = comparison.step
    print(
        f"Step: predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}, "
        f"error {_percent(step.error)}"
    )
    _print_kinds("Durations by kind", comparison.kinds)
    _print_devices(comparison)
    _print_worst(comparison)
    _print_memory(comparison)
    if comparison.transfers:
        _print_transfers(comparison.transfers)
    print()
    _print_differences(comparison)


def _print_kinds(title: str, kinds: Sequence[KindSummary]) -> None:
    rows = [
        (
            kind.kind.value,
            kind.count,
            seconds_text(kind.predicted_s),
            seconds_text(kind.measured_s),
            _percent(kind.bias),
            _magnitude(kind.median_error),
            _worst(kind),
            "–" if kind.worst is None else str(kind.worst.action),
        )
        for kind in kinds
    ]
    print_table(
        title, ("kind", "actions", "predicted", "measured", "error", "median error", "worst error", "worst at"), rows
    )


def _print_transfers(transfers: Sequence[TransferSummary]) -> None:
    rows = [
        (
            each.kind.value,
            each.count,
            _offset(each.start),
            _offset(each.end),
            "–" if each.moved is None else f"{_percent(each.moved.bias)}, worst {_worst(each.moved)}",
        )
        for each in transfers
    ]
    columns = ("kind", "messages", "starts off by", "ends off by", "transfer's error")
    print_table("Messages: median, and worst, of predicted − measured times", columns, rows)
    if any(each.moved is None for each in transfers):
        print(
            "This transport does not report when a transfer ran: a measured message ends when its receiver has waited\n"
            "for it, so its duration is not compared with the time on the link."
        )


def _offset(off: Offset) -> str:
    return f"{seconds_text(off.median_s)}, {_signed_seconds(off.worst_s)}"


def _worst(kind: KindSummary) -> str:
    """The worst relative error, with its size in seconds."""
    if kind.worst_error is None or kind.worst_off_s is None:
        return "–"
    return f"{_percent(kind.worst_error)} ({_signed_seconds(kind.worst_off_s)})"


def _signed_seconds(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{seconds_text(abs(value))}"


def _print_devices(comparison: Comparison) -> None:
    rows = [
        (
            str(time.device),
            seconds_text(time.compute.predicted),
            seconds_text(time.compute.measured),
            _percent(time.compute.error),
            f"{bubble.predicted:.1%}",
            f"{bubble.measured:.1%}",
            f"{(bubble.predicted - bubble.measured) * 100:+.1f}",
        )
        for time, bubble in zip(comparison.devices, comparison.bubbles, strict=True)
    ]
    columns = ("device", "predicted", "measured", "error", "bubble predicted", "bubble measured", "points")
    print_table("Compute time of each device, and its bubble", columns, rows)


def _print_worst(comparison: Comparison) -> None:
    rows = [
        (
            f"{each.action}, device {each.device}",
            seconds_text(each.duration.predicted),
            seconds_text(each.duration.measured),
            _percent(each.duration.error),
            seconds_text(each.duration.predicted - each.duration.measured),
        )
        for each in worst_actions(comparison, SHOWN)
    ]
    print_table("Largest errors", ("action", "predicted", "measured", "error", "off by"), rows)


def _print_memory(comparison: Comparison) -> None:
    several = len({memory.kind for memory in comparison.memory}) > 2  # the total of one kind is that kind
    rows = [
        (
            f"{memory.device} {memory.kind}",
            bytes_text(memory.peak.predicted),
            bytes_text(memory.peak.measured),
            _percent(memory.peak.error),
        )
        for memory in comparison.memory
        if several or memory.kind != TOTAL
    ]
    if rows:
        print_table("Peak memory of each device", ("device", "predicted", "measured", "error"), rows)


def _print_differences(comparison: Comparison) -> None:
    queues = len(comparison.order)
    print(f"Order: differs on {counted(queues, 'queue')}" if queues else "Order: the same on every queue")
    _print_some(
        [
            f"device {d.device}, {d.queue}: {d.differing} positions differ; at {d.position} "
            f"{d.predicted} was predicted and {d.measured} ran"
            for d in comparison.order
        ]
    )
    for name, only in (("prediction", comparison.only_predicted), ("measurement", comparison.only_measured)):
        if only:
            print(f"Only in the {name}: {counted(len(only), 'action')}")
            _print_some([f"{item.action} on device {item.device}" for item in only])


def _print_some(lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more: see --json")


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"


def _magnitude(error: float | None) -> str:
    """An error without its sign."""
    return "–" if error is None else f"{error:.1%}"
