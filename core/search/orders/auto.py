"""The search for the fastest schedule within a memory limit, from simple patterns and published schedules.

1. Keys: every start is annealed as priorities of a list scheduler (`anneal_keys`), many actions at a time.
2. Periodic orders, where the limit is at most half of 1F1B's memory: patterns of one to four microbatches are annealed
   (`anneal_periodic`), one action of all groups of microbatches at a time.
3. Orders: the best of those, and the best published one, are annealed as orders (`local`), one action at a time.
4. Steady state: the order of a few microbatches in the middle is repeated for all of them (`steady_state`); the best
   result is annealed alongside the best of 3.

Successive halving (Karnin et al. 2013): the better candidates get more evaluations. Nothing reads a clock: a budget
counts orders, and the same input gives the same bytes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import define, evolve

from ...evaluate.coding import INFINITY, KINDS, Integers, decode_orders, encode
from ...evaluate.reference import Evaluation, evaluate
from ...schedules.construction.decode import DECODING, decode
from ...schedules.construction.instance import Instance, codes_of, instance
from ...schedules.construction.local import improve, makespan_of
from ...schedules.construction.shifts import join
from ...schedules.problem import Schedule, ScheduleFamily, ScheduleProblem, resident
from ...schedules.scored import Scored, costs_of
from ...schedules.tradeoff import fastest
from .anneal_keys import anneal_keys
from .anneal_periodic import anneal_periodic
from .initial_keys import KeyState, instances_that_fit, mirrored_instances, patterns, published
from .lower_bound import lower_bound
from .periodic import PeriodicState, periodic_starts
from .steady_state import repeat_steady_state

EVALUATIONS = 800_000
"""About ten seconds for 8 devices and 32 microbatches on one core."""

KEYS_SHARE = 0.2
"""Share of the evaluations for keys."""
FIRST_SHARE = 0.3
"""Share of these for all starts together; the best ``WIDTH`` get the rest."""
WIDTH = 4
"""Number of starts that are then annealed as orders; one less next to periodic orders."""
PERIODIC_SHARE = 0.2
"""Share of the evaluations for periodic orders, where there are any."""
PERIODIC_WIDTH = 3
"""Number of periodic orders that are then annealed as orders."""
PERIODIC_BELOW = 0.5
"""Periodic orders are tried up to this share of the memory of 1F1B. Above it they take evaluations from moves that find
as fast orders: of the public cases there 7 became faster and 7 slower."""
LAST_SHARE = 0.5
"""Share of the evaluations of orders for the best of them."""
REPEATING = 40
"""Cost of repeating a steady state and evaluating the result, in evaluations of an order."""
STEADY_SHARE = 0.4
"""Largest part of the last share for steady states, by time; a few dozen microbatches need a small part of it."""
TRIAL_SHARE = 0.25
"""Part of the last share for each of two candidates; the better one gets the rest."""
KEYS_TEMPERATURE, PERIODIC_TEMPERATURE, ORDERS_TEMPERATURE, LAST_TEMPERATURE = 0.001, 0.005, 0.002, 0.001
"""Initial temperatures of annealing, as shares of the makespan."""


@define(eq=False)
class _CodedOrders:
    """Coded orders of an instance, with their makespan once it is known."""

    task: Instance
    orders: Integers
    lengths: Integers
    makespan: float = float("inf")


def find_schedule(
    problems: Sequence[ScheduleProblem],
    families: Iterable[ScheduleFamily],
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
) -> Scored:
    """The fastest schedule found within the memory limit.

    Args:
        problems: the same problem for each number of chunks per device to consider.
        families: published schedules to start from; those that offload are left out.
        evaluations: approximate number of orders to try; every start is tried at least once.
        seed: of the random numbers.

    Raises:
        InfeasibleError: the limit is below one microbatch on every stage of a device.
    """
    tasks = instances_that_fit(problems)
    repeated = [task for task in tasks + mirrored_instances(problems) if _is_short(task)]
    bound = min(map(lower_bound, dict.fromkeys(tasks + repeated)))
    known = resident(families)
    states: list[KeyState] = [state for task in tasks for state in patterns(task)]
    named: list[Scored] = []
    tried = 0
    for problem in dict.fromkeys(task.problem for task in tasks):
        starts, found = published(problem, known)
        states += starts
        tried += len(found)
        named += [Scored(problem, schedule, result) for schedule, result in found]
    best = fastest(named) if named else None
    width, periodic_share = (WIDTH - 1, PERIODIC_SHARE) if repeated else (WIDTH, 0.0)
    left, decoded = _anneal_keys(states, int(KEYS_SHARE * evaluations / DECODING), width, seed, bound)
    repeating = [state for task in repeated for state in periodic_starts(task)]
    periodic, turned = _anneal_periodic(repeating, int(periodic_share * evaluations), seed, bound)
    candidates = [_decoded(state) for state in left]
    candidates += [_CodedOrders(state.task, state.orders, state.lengths) for state in periodic]
    if best is not None:
        candidates.append(_coded(best.problem, best.schedule))
    winner, moved = _anneal_orders(candidates, int((1 - KEYS_SHARE - periodic_share) * evaluations), seed, bound)
    name = f"auto(evaluations={evaluations},seed={seed})"
    schedule = winner.task.schedule(name, winner.orders, winner.lengths)
    schedule, result = _fuse(winner.task, schedule)
    ordered = Scored(winner.task.problem, schedule, result)
    best = ordered if best is None else fastest([best, ordered])
    return evolve(best, evaluations=tried + decoded + turned + moved, bound=bound)


def _is_short(task: Instance) -> bool:
    """Whether the memory limit is at most half of what 1F1B holds: a microbatch for each device."""
    limit, problem = task.problem.memory_limit, task.problem
    return limit is not None and limit <= PERIODIC_BELOW * problem.devices * task.least_memory * (1 + 1e-3)


def _anneal_keys(
    states: list[KeyState], evaluations: int, width: int, seed: int, bound: float
) -> tuple[list[KeyState], int]:
    """The best ``width`` starts after annealing, best first, and the number of decoded orders."""
    left, tried = states, 0
    for number, share in enumerate((FIRST_SHARE, 1 - FIRST_SHARE)):
        each = max(int(share * evaluations / len(left)), 1)
        for place, state in enumerate(left):
            state.makespan, count = anneal_keys(
                seed * 1_000_003 + number * 1009 + place, each, KEYS_TEMPERATURE, bound * (1 + 1e-12),
                state.task.scheduler_input(state.fused), state.priorities,
            )  # fmt: skip
            tried += count
        left = sorted(left, key=lambda state: state.makespan)
        left = _best_placements_first(left)[:width]
    return left, tried


def _anneal_periodic(
    states: list[PeriodicState], evaluations: int, seed: int, bound: float
) -> tuple[list[PeriodicState], int]:
    """The best periodic orders, best first, and the number of patterns tried.

    Each round has an equal part of the evaluations, for a third of the states of the round before.
    """
    sizes = [len(states)]
    while sizes[-1] > PERIODIC_WIDTH:
        sizes.append(max(-(-sizes[-1] // 3), PERIODIC_WIDTH))
    left, tried = states, 0
    for number, size in enumerate(sizes):
        left = left[:size]
        for place, state in enumerate(left):
            state.makespan, count = anneal_periodic(
                seed * 1_000_003 + number * 1009 + place, int(evaluations / len(sizes) / size), PERIODIC_TEMPERATURE,
                bound * (1 + 1e-12), state.task.problem.microbatches, state.group, *state.task.for_orders()[1:],
                state.ring, state.turns, state.orders, state.lengths, state.task.scratch(),
            )  # fmt: skip
            tried += count
        left = sorted(left, key=lambda state: state.makespan)
    return left, tried


def _anneal_orders(
    candidates: list[_CodedOrders], evaluations: int, seed: int, bound: float
) -> tuple[_CodedOrders, int]:
    """The best of some orders after annealing, and the number of moves tried."""
    each = int((1 - LAST_SHARE) * evaluations / len(candidates))
    tried = sum(
        _improve(found, seed * 1_000_003 + place, each, ORDERS_TEMPERATURE, bound)
        for place, found in enumerate(candidates)
    )
    best = min(candidates, key=lambda found: found.makespan)
    last, number = int(LAST_SHARE * evaluations), seed * 1_000_003 + len(candidates)
    repeated = [_repeated(found, int(STEADY_SHARE * last / REPEATING / len(candidates))) for found in candidates]
    tried += sum(count for _, count in repeated)
    other = min((found for found, _ in repeated), key=lambda found: found.makespan)
    if other.makespan < INFINITY:
        for found in (best, other):
            tried += _improve(found, number, int(TRIAL_SHARE * last), LAST_TEMPERATURE, bound)
            number += 1
        best = min(best, other, key=lambda found: found.makespan)
        last -= 2 * int(TRIAL_SHARE * last)
    return best, tried + _improve(best, number, last, LAST_TEMPERATURE, bound)


def _repeated(found: _CodedOrders, most: int) -> tuple[_CodedOrders, int]:
    """The best order that repeats a steady state of this one, and the number of orders tried."""
    makespan, orders, tried = repeat_steady_state(found.task, found.orders, found.lengths, most)
    return _CodedOrders(found.task, orders, found.lengths, makespan), tried


def _improve(found: _CodedOrders, seed: int, moves: int, temperature: float, bound: float) -> int:
    """Anneal orders in place; return the number of moves tried."""
    found.makespan, tried = improve(
        seed, moves, temperature, bound * (1 + 1e-12), *found.task.for_orders(), found.orders, found.lengths,
        found.task.scratch(),
    )  # fmt: skip
    return tried


def _best_placements_first(states: list[KeyState]) -> list[KeyState]:
    """The best state of each placement, then the others: a placement that is slow now may be the fastest after more
    annealing."""
    first = list({state.task: state for state in reversed(states)}.values())
    return sorted(first, key=lambda state: state.makespan) + [state for state in states if state not in first]


def _decoded(state: KeyState) -> _CodedOrders:
    """The order of a state's keys."""
    task = state.task
    width = 3 * task.stages_on.shape[1] * task.problem.microbatches
    orders = np.zeros((task.problem.devices, width), dtype=np.int64)
    lengths = np.zeros(task.problem.devices, dtype=np.int64)
    decode(task.scheduler_input(state.fused), state.priorities, orders, lengths)
    return _CodedOrders(task, orders, lengths)


def _coded(problem: ScheduleProblem, schedule: Schedule) -> _CodedOrders:
    """The coded orders of a published schedule."""
    return _CodedOrders(instance(problem, schedule.placement), *codes_of(schedule))


def _fuse(task: Instance, schedule: Schedule) -> tuple[Schedule, Evaluation]:
    """Replace I directly followed by its own W by B, for all stages or one by one, if the step does not get slower."""
    costs, hop = costs_of(task.problem), task.problem.hop_s
    stages, count = len(task.placement), task.problem.microbatches
    given, scratch = task.for_orders(), task.scratch()
    orders, lengths = encode(schedule.device_actions, stages, count)
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=hop)
    least = result.makespan
    for first, last in [(0, stages), *((stage, stage + 1) for stage in range(stages))]:
        rows, sizes = orders.copy(), lengths.copy()
        for device, row in enumerate(rows):
            sizes[device] = join(row, sizes[device], KINDS * count * first, KINDS * count * last)
        if (sizes == lengths).all():
            continue
        makespan = makespan_of(*given, rows, sizes, scratch)
        if makespan <= least:
            orders, lengths, least = rows, sizes, makespan
    joined = decode_orders(orders, lengths, stages, count)
    if joined == schedule.device_actions:
        return schedule, result
    schedule = evolve(schedule, device_actions=joined)
    return schedule, evaluate(joined, schedule.placement, costs, hop_s=hop)
