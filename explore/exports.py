"""Files that the page offers: what it shows as a plan, a trace, a report, a picture, or a schedule file."""

from attrs import frozen

from ..core.errors import RequestError
from ..core.plan.plan import Plan, plan_json
from ..core.report.chart import comparison_svg, step_svg
from ..core.report.facts import ReportFacts
from ..core.report.page import report_html
from ..core.report.schedule import schedule_html, schedule_svg, schedule_trace
from ..core.schedules.schedule_csv import schedule_csv
from ..core.schedules.scored import Scored
from ..core.trace.perfetto import trace_json
from ..core.trace.trace import Trace


@frozen
class File:
    """A file for the user.

    Args:
        name: name of the file.
        media_type: its media type (MIME), for the Content-Type header.
        text: its contents.
    """

    name: str
    media_type: str
    text: str


def schedule_file(scored: Scored, what: str) -> File:
    """A file about a schedule of uniform stages.

    Args:
        scored: the schedule.
        what: ``plan`` (the schedule file of ``torch.distributed.pipelining``), ``trace``, ``report`` or ``svg``.
    """
    match what:
        case "plan":
            text = schedule_csv(scored.schedule.device_actions, scored.schedule.placement)
            return File("schedule.csv", "text/csv", text)
        case "trace":
            return File("trace.json", "application/json", trace_json({"": schedule_trace(scored)}))
        case "report":
            return File("report.html", "text/html", schedule_html(scored))
        case "svg":
            return File("schedule.svg", "image/svg+xml", schedule_svg(scored))
    raise _unknown(what)


def plan_file(plan: Plan | None, predicted: Trace, measured: Trace | None, facts: ReportFacts, what: str) -> File:
    """A file about a plan or traces; ``what`` as in ``schedule_file``, where ``plan`` is the plan file."""
    match what:
        case "plan":
            if plan is None:
                raise RequestError("these traces have no plan: open it together with them")
            return File("plan.json", "application/json", plan_json(plan))
        case "trace":
            return File("trace.json", "application/json", trace_json({"": measured or predicted}))
        case "report":
            return File(
                "report.html", "text/html", report_html(plan=plan, predicted=predicted, measured=measured, facts=facts)
            )
        case "svg":
            title = "step" if plan is None else plan.schedule
            drawn = step_svg(predicted, title) if measured is None else comparison_svg(predicted, measured, title)
            return File("step.svg", "image/svg+xml", drawn)
    raise _unknown(what)


def _unknown(what: str) -> RequestError:
    return RequestError(f"there is no file '{what}': ask for plan, trace, report or svg")
