"""The search over schedules: from patterns and published orders, the fastest one that the memory limit allows.

Successive halving (Karnin et al. 2013) over starts: each gets a few evaluations, the better half goes on with twice as
many, until one is left. Nothing reads a clock: a budget counts evaluations, and the same input gives the same bytes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import evolve

from ..actions import Action, Kind
from ..evaluate import Evaluation, evaluate
from ..schedules.decode import decode
from ..schedules.instance import Instance
from ..schedules.problem import Schedule, ScheduleFamily, ScheduleProblem
from ..schedules.scored import Scored, costs_of
from .anneal import anneal
from .bound import lower_bound
from .starts import State, enough_memory, patterns, published

EVALUATIONS = 36_000
"""About ten seconds for 8 devices and 32 microbatches on one core."""
FIRST_SHARE = 0.1
"""Share of the evaluations that all starts get together."""
WIDTHS = (4, 1)
"""Starts that are left after each round."""
WARMTH = 0.001
"""First temperature of annealing, as a share of the makespan."""


def find_schedule(
    problems: Sequence[ScheduleProblem], families: Iterable[ScheduleFamily], *, evaluations: int = EVALUATIONS,
    seed: int = 0,
) -> Scored:  # fmt: skip
    """The fastest schedule found within the memory limit.

    Args:
        problems: the same problem for each number of chunks a device to look at.
        families: published schedules to start from.
        evaluations: orders to try; about that many, and at least one of every start.
        seed: of the random numbers.

    Raises:
        InfeasibleError: the limit is below one microbatch on every stage of a device.
    """
    tasks = enough_memory(problems)
    bound = min(lower_bound(task) for task in tasks)
    known = list(families)
    states: list[State] = [state for task in tasks for state in patterns(task)]
    best: tuple[ScheduleProblem, Schedule, Evaluation] | None = None
    tried = 0
    for problem in dict.fromkeys(task.problem for task in tasks):
        starts, found, count = published(problem, known)
        tried += count
        states += starts
        for schedule, result in found:
            if best is None or _better(result, best[2]):
                best = problem, schedule, result
    winner, more = _halving(states, evaluations, seed, bound)
    tried += more
    schedule, result = _order(winner, seed, evaluations)
    if best is None or result.makespan < best[2].makespan * (1 - 1e-12):
        best = winner.task.problem, schedule, result
    return Scored(*best, tried, bound)


def _better(one: Evaluation, other: Evaluation) -> bool:
    return (one.makespan, max(one.peak_memory)) < (other.makespan, max(other.peak_memory))


def _halving(states: list[State], evaluations: int, seed: int, bound: float) -> tuple[State, int]:
    """The best of all starts after annealing, and how many orders were tried."""
    tried = 0
    left, share = states, FIRST_SHARE
    for number, width in enumerate((*WIDTHS, 0)):
        each = max(int(share * evaluations / len(left)), 1)
        for place, state in enumerate(left):
            task = state.task
            state.makespan, count = anneal(
                seed * 1_000_003 + number * 1009 + place, each, WARMTH, bound * (1 + 1e-12), task.problem.microbatches,
                task.placement, task.stages_on, task.fused_times(state.fused), task.hops, _need(state), _kept(state),
                task.limits, state.keys, state.patience, state.caps, state.fused,
            )  # fmt: skip
            tried += count
        left = sorted(left, key=lambda state: state.makespan)
        if width:
            left = _varied(left)[:width] if number == 0 else left[:width]
            share = (1 - FIRST_SHARE) / len(WIDTHS)
    return left[0], tried


def _varied(states: list[State]) -> list[State]:
    """The best of every placement first, then the others: a placement that starts slowly may end fastest."""
    first = list({state.task: state for state in reversed(states)}.values())
    return sorted(first, key=lambda state: state.makespan) + [state for state in states if state not in first]


def _need(state: State) -> "np.ndarray":
    """What F reserves; a fused stage needs no more than it saves."""
    return np.where(state.fused, state.task.saved, state.task.need)


def _kept(state: State) -> "np.ndarray":
    """Held after I; a fused stage holds nothing more after its backward."""
    return np.where(state.fused, state.task.saved, state.task.kept)


def _order(state: State, seed: int, evaluations: int) -> tuple[Schedule, Evaluation]:
    """The order of a state, with I and W fused where that costs nothing."""
    task = state.task
    orders = np.empty((task.problem.devices, 3 * task.stages_on.shape[1] * task.problem.microbatches), dtype=np.int64)
    lengths = np.zeros(task.problem.devices, dtype=np.int64)
    decode(
        task.problem.microbatches, task.placement, task.stages_on, task.fused_times(state.fused), task.hops,
        _need(state), _kept(state), task.limits, state.keys, state.patience, state.caps, state.fused, orders, lengths,
    )  # fmt: skip
    name = f"auto(evaluations={evaluations},seed={seed})"
    return _fuse(task, task.schedule(name, orders, lengths, state.fused))


def _fuse(task: Instance, schedule: Schedule) -> tuple[Schedule, Evaluation]:
    """I followed by its own W becomes B, stage by stage, where the step is not slower for it."""
    costs, hop = costs_of(task.problem), task.problem.hop_s
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=hop)
    for stages in [set(range(task.problem.stages)), *({stage} for stage in range(task.problem.stages))]:
        rows = tuple(_fused(row, stages) for row in schedule.device_actions)
        if rows == schedule.device_actions:
            continue
        other = evaluate(rows, schedule.placement, costs, hop_s=hop)
        fits = all(peak <= limit for peak, limit in zip(other.peak_memory, task.limits, strict=True))
        if fits and other.makespan <= result.makespan:
            schedule, result = evolve(schedule, device_actions=rows), other
    return schedule, result


def _fused(row: Sequence[Action], stages: set[int]) -> tuple[Action, ...]:
    out: list[Action] = []
    for action in row:
        last = out[-1] if out else None
        if (
            last is not None and action.kind is Kind.W and last.kind is Kind.I and action.stage in stages
            and (last.stage, last.microbatch) == (action.stage, action.microbatch)
        ):  # fmt: skip
            out[-1] = Action(action.stage, Kind.B, action.microbatch)
        else:
            out.append(action)
    return tuple(out)
