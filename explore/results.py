"""Results on disk that the explorer shows: plans, traces and schedule files, as the command line names them;
and files that the page offers: what it shows as a plan, a trace, a report, a picture, or a schedule file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ..answers.plan_files import read_plan_or_schedule
from ..answers.step_tables import idle_of
from ..core.errors import RequestError, naming
from ..core.files.limits import TRACE
from ..core.files.read import read_text
from ..core.plan.plan import Plan, plan_json
from ..core.report.chart.steps import steps_svg
from ..core.report.data import ReportFacts, report_data
from ..core.report.page import report_html
from ..core.report.schedule import schedule_html, schedule_svg, schedule_trace
from ..core.schedules.schedule_csv import schedule_csv
from ..core.schedules.scored import Scored
from ..core.trace.perfetto import trace_json
from ..core.trace.perfetto_reader import read_trace
from ..core.trace.trace import Trace
from ..core.validation.validate import check_actions
from ..simulators.run import simulate


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


GRAPH = "panpipe.opgraph/"


@frozen
class Result:
    """One report to show.

    Args:
        plan: the plan; None for traces alone.
        predicted: a trace of it; None simulates the plan.
    """

    title: str
    plan: Plan | None
    predicted: Trace | None
    measured: Trace | None


@frozen
class Results:
    """The files that the command line named."""

    shown: tuple[Result, ...] = ()
    graph: Path | None = None

    @property
    def titles(self) -> list[str]:
        """The titles of the results, for the page's list."""
        return [result.title for result in self.shown]

    def answer(self, number: int) -> dict[str, Any]:
        """The data of the page for one result.

        Raises:
            RequestError: there is no such result.
        """
        plan, predicted, measured, facts = self._traces(number)
        data = report_data(plan, predicted, measured, facts)
        return {"report": data if plan is None else with_names(data, plan)}

    def file(self, number: int, what: str) -> File:
        """A file about one result. Errors as in ``answer``."""
        return plan_file(*self._traces(number), what)

    def _traces(self, number: int) -> tuple[Plan | None, Trace, Trace | None, ReportFacts]:
        if not 0 <= number < len(self.shown):
            raise RequestError(f"there is no result {number}: {len(self.shown)} were opened")
        result = self.shown[number]
        predicted, facts = result.predicted, ReportFacts(title=result.title)
        if result.plan is not None and result.plan.prediction is not None:
            with naming(result.title):
                run = simulate(result.plan)
            predicted = predicted or run.trace
            facts = ReportFacts(title=result.title, idle=idle_of(run), kept=run.kept)
        assert predicted is not None  # open_results refuses a plan without costs and trace
        return result.plan, predicted, result.measured, facts


def open_results(paths: Sequence[Path]) -> Results:
    """Read files: plans and schedule files, traces, operator graphs.

    Traces belong to the plan whose hash they state. Two traces without their plan are compared.

    Raises:
        RequestError: a file cannot be read, is of another version, or is none of these.
    """
    plans: list[tuple[Path, Plan]] = []
    traces: list[tuple[Path, Trace]] = []
    graph: Path | None = None
    for path in paths:
        kind = "csv" if path.suffix == ".csv" else _kind(path)
        if kind == "trace":
            traces.append((path, read_trace(path)))
        elif kind == "graph":
            graph = path
        else:
            plan = read_plan_or_schedule(path).plan
            with naming(path):
                check_actions(plan)
            plans.append((path, plan))
    return Results((*_of_plans(plans, traces), *_of_traces(traces, {plan.hash for _, plan in plans})), graph)


def _kind(path: Path) -> str:
    text = read_text(path, TRACE)
    if '"traceEvents"' in text or text.lstrip().startswith("["):
        return "trace"
    return "graph" if GRAPH in text[:1000] else "plan"


def _of_plans(plans: Sequence[tuple[Path, Plan]], traces: Sequence[tuple[Path, Trace]]) -> list[Result]:
    shown = []
    for path, plan in plans:
        own = [(where, trace) for where, trace in traces if trace.plan_hash == plan.hash]
        predicted = next((trace for _, trace in own if trace.source == "simulated"), None)
        measured = [(where, trace) for where, trace in own if trace.source != "simulated"]
        if plan.prediction is None and predicted is None:
            raise RequestError(f"{path} has no costs to simulate it: plan it, or also give a trace of it")
        names = " + ".join(each.name for each in (path, *(where for where, _ in own)))
        shown.append(Result(names, plan, predicted, measured[0][1] if measured else None))
        shown += [Result(f"{path.name} + {where.name}", plan, predicted, trace) for where, trace in measured[1:]]
    return shown


def _of_traces(traces: Sequence[tuple[Path, Trace]], known: set[str]) -> list[Result]:
    left = [(where, trace) for where, trace in traces if trace.plan_hash not in known]
    if known and left:
        raise RequestError(f"{left[0][0]} is of another plan than those given: give its own plan, or no plan")
    predicted = [item for item in left if item[1].source == "simulated"]
    measured = [item for item in left if item[1].source != "simulated"]
    if len(predicted) == 1 and len(measured) == 1:
        title = f"{predicted[0][0].name} + {measured[0][0].name}"
        return [Result(title, None, predicted[0][1], measured[0][1])]
    return [Result(where.name, None, trace, None) for where, trace in left]


MOST_NAMES = 4000
"""Most module names of a stage that the page can search."""


def with_names(data: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The data with the modules of every stage by their whole names, for the search."""
    for stage, shown in zip(plan.stages, data["plan"]["stages"], strict=True):
        modules = dict.fromkeys(name.rpartition("/")[0] or name for name in stage.nodes)
        shown["names"] = list(modules)[:MOST_NAMES]
    return data
