"""Files that the page offers: what it shows as a plan, a trace, a report, a picture, or a schedule file."""

from collections.abc import Callable

from attrs import frozen

from ..core.errors import RequestError
from ..core.plan.plan import Plan, plan_json
from ..core.report.chart.steps import steps_svg
from ..core.report.data import ReportFacts
from ..core.report.page import report_html
from ..core.report.schedule import schedule_html, schedule_svg, schedule_trace
from ..core.schedules.schedule_csv import schedule_csv
from ..core.schedules.scored import Scored
from ..core.trace.perfetto import trace_json
from ..core.trace.trace import Trace


@frozen
class File:
    """A file for the user."""

    name: str
    media_type: str
    text: str


_KINDS = {
    "plan": ("plan.json", "application/json"),
    "trace": ("trace.json", "application/json"),
    "report": ("report.html", "text/html"),
    "svg": ("step.svg", "image/svg+xml"),
}


def schedule_file(scored: Scored, what: str) -> File:
    """A file about a schedule of uniform stages.

    Args:
        what: ``plan`` (the schedule file of ``torch.distributed.pipelining``), ``trace``, ``report`` or ``svg``.
    """
    if what == "plan":
        text = schedule_csv(scored.schedule.device_actions, scored.schedule.placement)
        return File("schedule.csv", "text/csv", text)
    return _file(
        what,
        trace=lambda: trace_json(schedule_trace(scored)),
        report=lambda: schedule_html(scored),
        svg=lambda: schedule_svg(scored),
    )


def plan_file(plan: Plan | None, predicted: Trace, measured: Trace | None, facts: ReportFacts, what: str) -> File:
    """A file about a plan or traces; ``what`` as in ``schedule_file``, where ``plan`` is the plan file."""
    if what == "plan" and plan is None:
        raise RequestError("these traces have no plan: open it together with them")
    drawn = [predicted, *([] if measured is None else [measured])]
    return _file(
        what,
        plan=lambda: plan_json(plan) if plan is not None else "",
        trace=lambda: trace_json(drawn[-1]),
        report=lambda: report_html(plan=plan, predicted=predicted, measured=measured, facts=facts),
        svg=lambda: steps_svg(drawn, "step" if plan is None else plan.schedule),
    )


def _file(what: str, **texts: Callable[[], str]) -> File:
    if what not in texts:
        raise RequestError(f"there is no file '{what}': ask for {', '.join(_KINDS)}")
    return File(*_KINDS[what], texts[what]())
