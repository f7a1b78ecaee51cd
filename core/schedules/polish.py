"""Polishing a published order for costs that its pattern was not drawn for."""

from attrs import evolve

from .problem import Schedule, ScheduleProblem
from .scored import costs_of, score

MOVES = 20_000
"""Moves tried of each kind of walk."""
EFFORT = 5_000_000
"""Most moves times actions of each: some hundredths of a second."""
WORTH = 1_000
"""Fewer moves than this find nothing in a large order."""
WARMTHS = (0.0, 0.0005)
"""First temperatures of annealing, as shares of the time: straight down, and about as far as a hop weighs."""


def polish(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """The order with single actions moved where that shortens the makespan; no device holds more than before.

    An order drawn for stages of equal times and messages that take none is left as it is where they are so.

    Args:
        problem: what the order is for.
        schedule: the order.
    """
    costs = costs_of(problem)
    times = {t for cost in costs for t in (cost.forward_s, cost.backward_input_s, cost.backward_weight_s)}
    moves = min(MOVES, EFFORT // max(sum(map(len, schedule.device_actions)), 1))
    if (len(times) == 1 and not problem.hop_s) or moves < WORTH:
        return schedule
    import numpy as np  # late, with what is compiled: they take longer to load than most schedules to build

    from .instance import codes_of, instance
    from .local import improve

    before = score(problem, schedule).result
    task = evolve(instance(problem, schedule.placement), limits=np.array(before.peak_memory) * (1 + 1e-9))
    best, least, room = schedule, before.makespan, task.room()
    for warmth in WARMTHS:
        orders, lengths = codes_of(schedule)
        makespan, _ = improve(0, moves, warmth, 0.0, *task.for_orders(), orders, lengths, room)
        if makespan < least:
            best, least = task.schedule(schedule.name, orders, lengths), makespan
    return best
