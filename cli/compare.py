"""``panpipe compare TRACE TRACE``: predicted against measured, action by action."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.compare import Comparison
from ..core.compare import compare as compare_traces
from ..core.documents import as_plain
from ..core.perfetto import read_trace
from .output import bytes_text, note, print_json, print_table, seconds_text

SHOWN = 5
"""How many single differences are printed for people; ``--json`` gives all."""


def compare(
    predicted: Annotated[Path, typer.Argument(help="Trace of the prediction.", show_default=False)],
    measured: Annotated[Path, typer.Argument(help="Trace of the measurement.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone, with every action.")] = False,
) -> None:
    """Lay a predicted trace over a measured one, action by action.

    Errors are predicted ÷ measured − 1: above 0 the prediction was too slow or too large.
    """
    comparison = compare_traces(read_trace(predicted), read_trace(measured))
    if not comparison.same_plan:
        note("the two traces ran different plans: only actions of equal names are compared")
    if json:
        print_json(as_plain(comparison))
        return
    step = comparison.step
    print(
        f"Step: predicted {seconds_text(step.predicted)}, measured {seconds_text(step.measured)}, "
        f"error {_percent(step.error)}"
    )
    _print_kinds(comparison)
    _print_devices(comparison)
    _print_differences(comparison)


def _print_kinds(comparison: Comparison) -> None:
    columns = ("kind", "count", "predicted", "measured", "bias", "median error", "mean error", "worst error", "at")
    rows = [
        (
            kind.kind.value,
            kind.count,
            seconds_text(kind.predicted_s),
            seconds_text(kind.measured_s),
            _percent(kind.bias),
            _size(kind.median_error),
            _size(kind.mean_error),
            _percent(kind.worst_error),
            "–" if kind.worst is None else f"{kind.worst.action}, device {kind.worst.device}",
        )
        for kind in comparison.kinds
    ]
    print_table("Durations by kind", columns, rows)


def _print_devices(comparison: Comparison) -> None:
    rows = [
        (
            f"device {bubble.device}, bubble",
            f"{bubble.predicted:.1%}",
            f"{bubble.measured:.1%}",
            f"{(bubble.predicted - bubble.measured) * 100:+.1f} points",
        )
        for bubble in comparison.bubbles
    ]
    rows += [
        (
            f"device {memory.device}, peak {memory.kind}",
            bytes_text(memory.peak.predicted),
            bytes_text(memory.peak.measured),
            _percent(memory.peak.error),
        )
        for memory in comparison.memory
    ]
    print_table("Devices", ("what", "predicted", "measured", "error"), rows)


def _print_differences(comparison: Comparison) -> None:
    queues = len(comparison.order)
    print("Order: the same on every queue" if queues == 0 else f"Order: differs on {queues} queue(s)")
    _print_some(
        [
            f"device {d.device}, {d.queue}: {d.differing} positions differ; at {d.position} "
            f"{d.predicted} was predicted and {d.measured} ran"
            for d in comparison.order
        ]
    )
    for name, only in (("prediction", comparison.only_predicted), ("measurement", comparison.only_measured)):
        if only:
            print(f"Only in the {name}: {len(only)} action(s)")
            _print_some([f"{item.action} on device {item.device}" for item in only])


def _print_some(lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more: see --json")


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"


def _size(error: float | None) -> str:
    return "–" if error is None else f"{error:.1%}"
