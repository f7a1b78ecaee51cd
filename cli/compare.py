"""``panpipe compare TRACE TRACE``: predicted against measured, action by action."""

from pathlib import Path

from ..answers.options import argument, json_flag, option
from ..answers.output import check_writable, note, print_json, print_records, seconds_text, write_noted
from ..core.documents import as_plain
from ..core.errors import RequestError, naming
from ..core.lowering.derive import forward_only
from ..core.plan.plan import read_plan
from ..core.trace.compare import TOTAL, Comparison, KindSummary, Offset, TransferSummary, worst_actions
from ..core.trace.compare import compare as compare_traces
from ..core.trace.perfetto_reader import read_trace
from ..core.validation.structure import check_structure
from ..core.wording import counted, signed_percent

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
    if report is not None or svg is not None:
        from ..core.report.chart.steps import steps_svg  # here: without pictures they are not needed
        from ..core.report.page import report_html

        with naming(*([] if plan is None else [plan])):
            write_noted(report, lambda: report_html(plan=ran, predicted=traces[0], measured=traces[1]))
        write_noted(svg, lambda: steps_svg(traces, predicted.stem if ran is None else ran.schedule))
    if json:
        print_json(as_plain(comparison))
    else:
        _print(comparison)


def _print(comparison: Comparison) -> None:
    step, bubbles = comparison.step, comparison.bubbles
    error = "–" if step.error is None else signed_percent(step.error)
    print(f"Step: predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}, error {error}")
    print_records(
        "Durations by kind", comparison.kinds,
        {"kind": "kind.value", "actions": "count", "predicted": "predicted_s s", "measured": "measured_s s",
         "error": "bias ±%", "median error": "median_error %", "worst error": _worst, "worst at": "worst.action"},
    )  # fmt: skip
    print_records(
        "Compute time of each device, and its bubble", comparison.devices,
        {"device": lambda each: str(each.device), "predicted": "compute.predicted s", "measured": "compute.measured s",
         "error": "compute.error ±%", "bubble predicted": lambda each: f"{bubbles[each.device].predicted:.1%}",
         "bubble measured": lambda each: f"{bubbles[each.device].measured:.1%}",
         "points": lambda each: signed_percent(bubbles[each.device].predicted - bubbles[each.device].measured)[:-1]},
    )  # fmt: skip
    print_records(
        "Largest errors", worst_actions(comparison, SHOWN),
        {"action": lambda each: f"{each.action}, device {each.device}", "predicted": "duration.predicted s",
         "measured": "duration.measured s", "error": "duration.error ±%",
         "off by": lambda each: seconds_text(each.duration.predicted - each.duration.measured)},
    )  # fmt: skip
    several = len({memory.kind for memory in comparison.memory}) > 2  # the total of one kind is that kind
    print_records(
        "Peak memory of each device", [each for each in comparison.memory if several or each.kind != TOTAL],
        {"device": lambda each: f"{each.device} {each.kind}", "predicted": "peak.predicted B",
         "measured": "peak.measured B", "error": "peak.error ±%"},
    )  # fmt: skip
    print_records(
        "Messages: median, and worst, of predicted − measured times", comparison.transfers,
        {"kind": "kind.value", "messages": "count", "starts off by": lambda each: _offset(each.start),
         "ends off by": lambda each: _offset(each.end), "transfer's error": _moved},
    )  # fmt: skip
    if any(each.moved is None for each in comparison.transfers):
        print(
            "This transport does not report when a transfer ran: a measured message ends when its receiver has waited\n"
            "for it, so its duration is not compared with the time on the link."
        )
    print()
    _print_differences(comparison)


def _moved(each: TransferSummary) -> str:
    moved = each.moved
    if moved is None:
        return "–"
    return f"{'–' if moved.bias is None else signed_percent(moved.bias)}, worst {_worst(moved)}"


def _offset(off: Offset) -> str:
    return f"{seconds_text(off.median_s)}, {_signed_seconds(off.worst_s)}"


def _worst(kind: KindSummary) -> str:
    """The worst relative error, with its size in seconds."""
    if kind.worst_error is None or kind.worst_off_s is None:
        return "–"
    return f"{signed_percent(kind.worst_error)} ({_signed_seconds(kind.worst_off_s)})" if kind.worst_off_s else "0.0%"


def _signed_seconds(value: float) -> str:
    text = seconds_text(value)
    return f"+{text}" if value > 0 and text != "0 s" else text


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
