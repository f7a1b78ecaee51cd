"""Answers on uniform stages: a schedule with its time and memory, and all schedules, time against memory."""

import json
from functools import lru_cache
from typing import Any

from attrs import evolve

from ..answers.plan_files import plan_of_order
from ..answers.uniform import CHUNKS_TO_TRY, build_schedule, figures, frontier_of
from ..core.errors import InfeasibleError
from ..core.plan.plan import MemoryPolicy, Plan
from ..core.report.schedule import schedule_data
from ..core.schedules.registry import families, resident_families
from ..core.schedules.scored import Scored, costs_of, peak_of, search_limits
from ..core.timing.idle import idle_data, idle_time
from ..core.timing.orders import evaluate
from .question import Report, UniformQuestion, key_of, parse_question, plain_question, progress
from .results import File, schedule_file

MOST_CACHED = 256
"""Most schedules that are cached, by question."""

ORDERS_TO_TRY = 40_000
"""Orders that ``auto`` tries for each point of the frontier."""


def scored_of(question: UniformQuestion) -> tuple[Scored, str]:
    """The schedule, and why it does not fit; empty if it does. One that does not fit is built without the limit.

    Raises:
        RequestError: there is no such schedule, or it does not support the question.
        InfeasibleError: no schedule exists within the limit.
    """
    return _built(key_of(question))


@lru_cache(MOST_CACHED)
def _built(key: str) -> tuple[Scored, str]:
    question = parse_question(json.loads(key))
    assert isinstance(question, UniformQuestion)
    try:
        return build_schedule(question.schedule, question, question.parameters), ""
    except InfeasibleError as error:
        try:
            scored = build_schedule(question.schedule, question, question.parameters, limited=False)
        except InfeasibleError:
            raise error from None
        limit = (question.memory_limit or 0.0) * scored.problem.chunks
        return evolve(scored, problem=evolve(scored.problem, memory_limit=limit)), str(error)


def answer(question: UniformQuestion, scored: Scored, misfit: str = "") -> dict[str, Any]:
    """The data of the page: the report, the figures of ``panpipe schedule --json``, and the command line."""
    return {
        "report": schedule_data(scored),
        "figures": figures(scored),
        "misfit": misfit,
        "command": question.command,
    }


def report_points(question: UniformQuestion, report: Report) -> None:
    """Time and memory of every schedule of the question's pipeline, and of what ``auto`` finds at their memory.

    Each point carries the question that it answers.
    """
    limit, counts = question.memory_limit, question.chunks_to_try or CHUNKS_TO_TRY
    known = list(families().values()) if question.host_copy else resident_families()
    named: list[Scored] = []
    for number, family in enumerate(known):
        report(**progress(family.name, number, len(known)))
        for parameters, scored in frontier_of(family, [question.problem(count, limit) for count in counts]):
            named.append(scored)
            report(point=point_of(question, scored, family.name, parameters))
    limits = search_limits(named, limit)
    for number, memory in enumerate(limits):
        report(**progress(f"auto, at most {memory:.4g}", number, len(limits)))
        asked = evolve(question, schedule="auto", memory_limit=memory, parameters={"evaluations": ORDERS_TO_TRY})
        found, misfit = scored_of(asked)
        if not misfit and all(found.schedule.name != scored.schedule.name for scored in named):
            report(point=point_of(asked, found, "auto", asked.parameters))


def point_of(question: UniformQuestion, scored: Scored, name: str, parameters: Any) -> dict[str, Any]:
    """A point of the frontier: a schedule's time and memory, and the question that it answers."""
    chunks = question.chunks if name == "auto" else scored.problem.chunks
    return {
        "name": scored.schedule.name,
        "family": name,
        "memory": peak_of(scored),
        "time": scored.result.makespan,
        "bubble": scored.result.bubble_ratio,
        "question": plain_question(evolve(question, schedule=name, parameters=parameters, chunks=chunks)),
    }


def report_answer(question: UniformQuestion, report: Report) -> None:
    """Report the schedule, and then why it is not faster."""
    scored, misfit = scored_of(question)
    report(answer=answer(question, scored, misfit))
    report(idle=why_not_faster(scored))


def why_not_faster(scored: Scored) -> dict[str, Any]:
    """The idle time of a schedule by cause, as plain data for the page."""
    problem, schedule = scored.problem, scored.schedule
    costs = costs_of(problem)
    plan = plan_of_order(schedule.name, schedule.device_actions, schedule.placement, problem.microbatches)
    plan = evolve(plan, memory=MemoryPolicy(offload=scored.offload))

    def alone(plan: Plan, _: bool) -> float:
        copies = scored.copies if plan.memory.offload else ()
        hop_s = problem.hop_s
        return evaluate(
            plan.device_actions, plan.placement, costs, edges=plan.edges, hop_s=hop_s, copies=copies
        ).makespan

    return idle_data(idle_time(plan, costs, scored.result.makespan, alone))


def file_of(question: UniformQuestion, what: str, report: Report) -> File:
    """A file about the schedule."""
    return schedule_file(scored_of(question)[0], what)
