"""Answers to questions on plans: the plan that ``panpipe plan`` finds, and time against memory of all schedules.

Results that took long are cached for the life of this process: the costs of a model, and plans by question.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve

from ..answers.plan.answer import PlanAnswer
from ..answers.plan.infeasible import InfeasibleAnswer
from ..answers.plan.planning import Found, plan_request
from ..answers.plan.request import PlanRequest, wanted_tensor
from ..answers.progress import best_text
from ..core.cluster.catalog.find import find_cluster
from ..core.errors import InfeasibleError, RequestError
from ..core.plan.plan import Plan, plan_json
from ..core.policies.sharding import NONE
from ..core.report.data import ReportFacts, report_data
from ..core.schedules.problem import ScheduleFamily
from ..core.search.suggestions.infeasible import NothingFits
from .question import PlanQuestion, Report, key_of, plain_question, progress
from .results import File, plan_file, with_names

EVALUATIONS_PER_FAMILY = 2_000
"""Evaluations of the search for the plan of one schedule family on the frontier."""


_costs: dict[tuple[object, ...], Callable[[int], Any]] = {}
_found: dict[tuple[object, ...], Found] = {}


def report_answer(question: PlanQuestion, report: Report) -> None:
    """Report the plan, its step in the simulator, and why it is not faster."""
    report(answer=answer(question, _planned(question, report)))


def file_of(question: PlanQuestion, what: str, report: Report) -> File:
    """A file about the plan."""
    shown = _planned(question, report)
    return plan_file(shown.plan, shown.run.trace, None, _facts(question, shown), what)


def _planned(question: PlanQuestion, report: Report) -> PlanAnswer:
    """The plan with its answer.

    Raises:
        RequestError: an option is wrong, or there are fewer plans than the question's rank.
        InfeasibleError: no plan fits; the message has the changes with which one would.
    """
    try:
        found = search(question, report)
    except NothingFits as nothing:
        report(**progress("nothing fits: looking for the smallest change with which a plan does"))
        raise InfeasibleError(InfeasibleAnswer(nothing, _request(question)[0]).text()) from None
    plans = found.result.plans
    if question.rank > len(plans):
        raise RequestError(
            f"the search found {len(plans)} plans and no plan {question.rank}: every other one is slower with no less "
            "memory"
        )
    report(**progress("simulating the plan"))
    return found.answer([plans[question.rank - 1]])


def _facts(question: PlanQuestion, shown: PlanAnswer) -> ReportFacts:
    limits = tuple(shown.limits) * shown.plan.mesh.data
    return ReportFacts(title=question.model, idle=shown.idle, kept=shown.run.kept, limits_bytes=limits)


def search(question: PlanQuestion, report: Report, what: str = "searching plans") -> Found:
    """The plans of a question; plans found earlier are cached. ``what`` names the search in the lines of progress.

    Raises:
        RequestError: an option is wrong.
        NothingFits: no plan fits.
    """
    key = key_of(evolve(question, rank=1)), *_file_times(question)
    if key in _found:
        return _found[key]
    request, known = _request(question)

    def searching(done: int, budget: int, step_s: float) -> None:
        report(**progress(f"{what}: {best_text(step_s)}", done, budget))

    report(**progress("reading costs"))
    found = _found[key] = Found(request, known, request.search(progress=searching))
    return found


def _request(question: PlanQuestion) -> tuple[PlanRequest, Sequence[ScheduleFamily]]:
    wanted_tensor(str(question.tp), find_cluster(question.cluster), question.cluster, question.model)
    request, known = plan_request(question, question.tp)
    names = (
        "graph", "model", "batch", "sequence", "dtype", "optimizer", "cluster", "kernels", "tp", "tp_overlap",
        "sequence_parallel", "cp", "cp_order", "ep",
    )  # fmt: skip
    key = *_file_times(question), question.within, question.shard != NONE, *(getattr(question, name) for name in names)
    return evolve(request, costs_of=_costs.setdefault(key, cache(request.costs_of))), known


def _file_times(question: PlanQuestion) -> list[int | None]:
    """When the files of a question were written: an answer to an earlier version of a file is not used again."""
    files = [Path(name) for name in (question.graph, question.cluster.partition("#")[0]) if name is not None]
    return [file.stat().st_mtime_ns if file.is_file() else None for file in files]


def answer(question: PlanQuestion, shown: PlanAnswer) -> dict[str, Any]:
    """The data of the page: the report, what ``panpipe plan --json`` prints, and the command line."""
    return {
        "report": with_names(report_data(shown.plan, shown.run.trace, None, _facts(question, shown)), shown.plan),
        "figures": shown.plain(),
        "plan": plan_json(shown.plan),
        "command": question.command,
    }


def report_points(question: PlanQuestion, report: Report) -> None:
    """Report time and memory of the plans of a question, and of the best plan of each schedule."""
    for rank, plan in enumerate(search(question, report).result.plans, start=1):
        report(point=_point(evolve(question, rank=rank), plan, "auto" if question.schedule == "auto" else ""))
    _, known = _request(question)
    for number, family in enumerate(known, start=1):
        what = f"plans of {family.name}, {number} of {len(known)} schedules"
        report(**progress(what, number - 1, len(known)))
        asked = evolve(question, schedule=family.name, budget=EVALUATIONS_PER_FAMILY, rank=1)
        try:
            plan = search(asked, report, what).plan
        except (RequestError, InfeasibleError):
            continue  # the family does not support the question, or does not fit
        report(point=_point(asked, plan, family.name))


def _point(question: PlanQuestion, plan: Plan, family: str) -> dict[str, Any]:
    prediction = plan.predicted
    return {
        "name": plan.schedule,
        "family": family or question.schedule,
        "memory": max(prediction.peak_memory_bytes),
        "time": prediction.step_s,
        "bubble": prediction.bubble_ratio,
        "question": plain_question(question),
    }
