"""``panpipe schedules``: all schedules for uniform stages, time against memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..answers.options import flag, json_flag, option, takes
from ..answers.output import note, print_json, print_records
from ..answers.uniform import CHUNKS_TO_TRY, UniformStages, check_search, figures, frontier_of, run_search
from ..core.errors import InfeasibleError, RequestError
from ..core.schedules.meaning import short_name
from ..core.schedules.problem import ScheduleProblem
from ..core.schedules.registry import families, resident_families
from ..core.schedules.scored import Scored, frontier, peak_of, search_limits
from .schedule import SEARCH


@takes(UniformStages)
def schedules(
    stages: UniformStages,
    *,
    auto: bool = flag(
        "Also search orders, at the memory of every schedule on the frontier that does not offload.", "--auto"
    ),
    evaluations: int | None = option(SEARCH["evaluations"]),
    seconds: float | None = option(SEARCH["seconds"]),
    seed: int | None = option(SEARCH["seed"]),
    json: bool = json_flag(),
) -> None:
    """Compare all schedules for uniform stages: time against memory.

    For a schedule with parameters, the best sets of parameters are shown. A star marks the frontier: no other schedule
    is faster with at most the same memory.
    """
    offloads, limit, counts = stages.host_copy is not None, stages.memory_limit, stages.chunks_to_try or CHUNKS_TO_TRY
    budget = {"evaluations": evaluations, "seconds": seconds, "seed": seed}
    given = {key: value for key, value in budget.items() if value is not None}
    if given and not auto:
        raise RequestError(f"--{next(iter(given))} is for the search: also give --auto")
    # Schedules that offload may fit where one microbatch's saved tensors do not.
    check_search(given, None if offloads else limit)
    known = list(families().values()) if offloads else resident_families()
    problems = [stages.problem(count, limit) for count in counts]
    found = [scored for family in known for _, scored in frontier_of(family, problems)]
    if auto:
        found += _searched(lambda limit: [stages.problem(count, limit) for count in counts], found, limit, given)
    if not found and limit is not None:
        raise InfeasibleError(
            f"no schedule holds at most {limit:g} on each device: raise --memory-limit, or leave it out"
        )
    best = {id(scored) for scored in frontier(found)}
    found.sort(key=lambda scored: (peak_of(scored), scored.result.makespan))
    if json:
        print_json({"schedules": [{**figures(scored), "on_frontier": id(scored) in best} for scored in found]})
        return
    print_records(
        "Times in the unit of --forward; memory in one device's saved tensors for one microbatch", found,
        {"schedule": lambda scored: short_name(scored.schedule.name),
         "best": lambda scored: "★" if id(scored) in best else "", "chunks": "problem.chunks", "peak memory": peak_of,
         "makespan": "result.makespan", "bubble": "result.bubble_ratio %"},
    )  # fmt: skip


def _searched(
    problems: Callable[[float], Sequence[ScheduleProblem]],
    named: Sequence[Scored],
    limit: float | None,
    given: Mapping[str, Any],
) -> list[Scored]:
    """New schedules that the search finds at the memory of each schedule on the frontier, and at the limit."""
    limits = search_limits(named, limit)
    found = []
    for number, memory in enumerate(limits, start=1):
        note(f"auto: {number} of {len(limits)}, at most {memory:.4g} on a device")
        try:
            best = run_search(problems(memory), given)
        except InfeasibleError as error:  # the search does not offload
            note(f"auto: {error}")
            continue
        if all(best.schedule.name != scored.schedule.name for scored in named):
            found.append(best)
    return found
