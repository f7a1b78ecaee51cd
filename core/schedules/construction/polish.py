"""Improving a published order for costs other than the equal ones of its paper."""

from attrs import evolve

from ..problem import Schedule, ScheduleProblem
from ..scored import ROUNDING, costs_of, score

MOVES = 20_000
"""Moves tried of each kind of walk."""
EFFORT = 5_000_000
"""Upper bound of moves × actions of each walk: some hundredths of a second."""
LEAST_MOVES = 1_000
"""Smallest number of moves for which a walk is run: fewer find nothing in a large order."""
MOVES_FOR_ANNEALING = 2_000
"""Smallest number of moves for which annealing is run after descent: with fewer, descent finds nearly as much."""
TEMPERATURES = (0.0, 0.0005)
"""Initial temperatures of annealing, as shares of the makespan: pure descent, and about the cost of a hop."""


def polish(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Move single actions where that shortens the makespan; no device holds more than before.

    With stages of equal times and messages without delay the order is returned unchanged, and where functions are
    interpreted.

    Args:
        problem: costs and delays.
        schedule: the order.
    """
    costs = costs_of(problem)
    times = {t for cost in costs for t in (cost.forward_s, cost.backward_input_s, cost.backward_weight_s)}
    moves = min(MOVES, EFFORT // max(sum(map(len, schedule.device_actions)), 1))
    if (len(times) == 1 and not problem.hop_s) or moves < LEAST_MOVES:
        return schedule
    import numpy as np  # here: numpy and compiled code take longer to load than most schedules to build

    from ...numba_cache import is_interpreted
    from .instance import codes_of, instance
    from .local import improve

    if is_interpreted():
        return schedule
    before = score(problem, schedule).result
    task = evolve(instance(problem, schedule.placement), limits=np.array(before.peak_memory) * (1 + ROUNDING))
    best, least, scratch = schedule, before.makespan, task.scratch()
    for temperature in TEMPERATURES if moves >= MOVES_FOR_ANNEALING else TEMPERATURES[:1]:
        orders, lengths = codes_of(schedule)
        makespan = improve(0, moves, temperature, *task.for_orders(), orders, lengths, scratch)
        if makespan < least:
            best, least = task.schedule(schedule.name, orders, lengths), makespan
    return best
