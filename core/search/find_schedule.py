"""The search for the fastest schedule within a memory limit: the planner's search, on stages that are given.

A budget counts orders, and the same input gives the same bytes unless a time limit ends the search. A lower bound on
the makespan of any order is part of the result.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import evolve

from ..cluster.cluster import fully_connected
from ..costs.costs import StageCosts, StageEdge
from ..costs.graph import OpGraph, OpNode
from ..errors import RequestError
from ..schedules.construction.initial_keys import instances_that_fit, patterns
from ..schedules.construction.list_scheduler import Instance
from ..schedules.construction.periodic import PeriodicOrders, periodic_starts
from ..schedules.meaning import PERIODIC
from ..schedules.problem import Schedule, ScheduleFamily, ScheduleProblem, resident
from ..schedules.scored import ROUNDING, Scored, costs_of, exceeds, fastest, named_schedules, score
from ..timing.coding import FORWARD, INPUT, WEIGHT, Floats, Integers
from .annealing.search import search
from .annealing.walk import Walk, start_walk
from .problem.meter import Meter, Stopped
from .problem.setting import FixedStages, Setting
from .search_options import SearchOptions

EVALUATIONS = 800_000
"""About ten seconds for 8 devices and 32 microbatches on one core."""
PERIODIC_BELOW, PERIODIC_SHARE = 0.5, 0.2
"""Share of the memory of 1F1B up to which periodic orders are annealed, and share of the evaluations for that."""
KEPT, TEMPERATURE = 3, 0.005
"""Number of periodic orders that are annealed further as orders, and the initial temperature as a share of the
makespan."""
FASTEST_BYTES_PER_S = 1e30
"""Rate of the links of a problem whose messages take the time of a hop, whatever their size."""


def find_schedule(
    problems: Sequence[ScheduleProblem],
    families: Iterable[ScheduleFamily],
    *,
    evaluations: int = EVALUATIONS,
    seconds: float | None = None,
    seed: int = 0,
) -> Scored:
    """The fastest schedule found within the memory limit.

    Args:
        problems: the same problem for each number of chunks per device to consider.
        families: published schedules to start from; those that offload are left out.
        evaluations: approximate number of orders to try; every start is tried at least once.
        seconds: a limit on the time of the search once its starts are built; at its end the best order so far is the
            result. The same input then need not give the same bytes.
        seed: of the random numbers.

    Raises:
        RequestError: no family supports any of the problems, or ``seconds`` is not above 0.
        InfeasibleError: the limit is below one microbatch on every stage of a device.
    """
    if seconds is not None and not seconds > 0:
        raise RequestError(f"the time limit of a search is {seconds:g} s: give a time above 0, such as 10")
    meter = Meter(evaluations, seconds)
    tasks, known = instances_that_fit(problems), resident(families)
    fitting = list(dict.fromkeys(task.problem for task in tasks))
    name = f"auto({'' if seconds is None else f'seconds={seconds:g},'}evaluations={evaluations},seed={seed})"
    found = [one for problem in fitting for one in named_schedules(problem, known) if not exceeds(one)]
    found += [_listed(task, name) for task in tasks]
    bound = min(map(lower_bound, tasks))
    settings = [_setting(problem, bound) for problem in fitting]
    try:
        periodic = _periodic_orders(tasks, int(PERIODIC_SHARE * evaluations), seed, meter)
    except Stopped:
        periodic = []
    more = [_walk(each, settings[fitting.index(each.task.problem)]) for each in periodic]
    chunks = [problem.chunks for problem in fitting]
    space = SearchOptions(families=known, min_chunks=min(chunks), max_chunks=max(chunks))
    walks, _ = search(settings, space, meter, seed, others=more)
    best = walks[0]
    if best.excess == 0:
        best.join_backwards()
        problem = fitting[settings.index(best.setting)]
        schedule = Schedule(name, tuple(best.best.placement.tolist()), problem.microbatches, best.orders())
        found.append(score(problem, schedule))
    best_of_all = fastest([one for one in found if not exceeds(one)])
    return evolve(best_of_all, evaluations=len(found) + meter.spent, bound=bound)


def _setting(problem: ScheduleProblem, bound: float) -> Setting:
    """The setting of a problem: its stages on devices that are joined by links of the hop's latency."""
    costs = tuple(
        StageCosts(
            cost.forward_s, cost.backward_input_s, cost.backward_weight_s, backward_s=cost.backward_s,
            saved_bytes=cost.saved_bytes, freed_by_input_bytes=cost.freed_by_input_bytes,
            created_by_input_bytes=cost.created_by_input_bytes,
        )
        for cost in costs_of(problem)
    )  # fmt: skip
    names = tuple((f"stage{stage}",) for stage in range(problem.stages))
    edges = tuple(StageEdge(stage, stage + 1, 1, 1) for stage in range(problem.stages - 1))
    graph = OpGraph(tuple(OpNode(name, 1.0, 1.0, 1.0) for (name,) in names))
    everything = 1 + problem.microbatches * sum(cost.saved_bytes + cost.created_by_input_bytes for cost in costs)
    limit = everything if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
    cluster = fully_connected(problem.devices, 1, FASTEST_BYTES_PER_S, problem.hop_s)
    places, kinds = (tuple(range(problem.devices)),), (0,) * problem.devices
    fixed = FixedStages(names, costs, edges, bound * (1 + ROUNDING))
    return Setting((graph,), cluster, places, problem.microbatches, kinds, (limit,) * problem.devices, fixed=fixed)


def _periodic_orders(tasks: Sequence[Instance], evaluations: int, seed: int, meter: Meter) -> list[PeriodicOrders]:
    """The best periodic orders of instances whose memory is short, best first.

    Each round has an equal part of the evaluations, for a third of the orders of the round before.
    """
    left = [found for task in tasks if _is_short(task) for found in periodic_starts(task)]
    sizes = [len(left)]
    while sizes[-1] > KEPT:
        sizes.append(max(-(-sizes[-1] // 3), KEPT))
    for number, size in enumerate(sizes):
        left = left[:size]
        for place, found in enumerate(left):
            moves = int(evaluations / len(sizes) / size)
            found.improve(seed * 1_000_003 + number * 1009 + place, moves, TEMPERATURE)
            meter.spend(moves)
        left = sorted(left, key=lambda found: found.makespan)
    return left


def _is_short(task: Instance) -> bool:
    """Whether the memory limit is at most a share of what 1F1B holds: a microbatch for each device."""
    limit, problem = task.problem.memory_limit, task.problem
    return limit is not None and limit <= PERIODIC_BELOW * problem.devices * task.least_memory * (1 + 1e-3)


def _walk(found: PeriodicOrders, setting: Setting) -> Walk:
    """A walk that starts with periodic orders."""
    schedule = found.task.schedule(PERIODIC, found.orders, found.lengths)
    walk = start_walk(setting, schedule, tuple(range(len(schedule.placement) + 1)), split=False)
    walk.annealed = True
    return walk


def _listed(task: Instance, name: str) -> Scored:
    """A list-scheduled order, which exists if one microbatch at a time fits."""
    listed = task.listed(next(patterns(task)))
    return score(task.problem, task.schedule(name, *listed[1:]))


def lower_bound(task: Instance) -> float:
    """A lower bound on the makespan of every order of these stages on these devices.

    The largest, over the devices, of
    - fill, work and drain: until the first gradient arrives, a device runs forwards alone, and no more than its memory
      holds; after the last I of its first stage it runs W alone, again no more than its memory held, while the gradient
      passes through all earlier stages, and stage 0 runs its W; in between it runs the rest of its work;
    - memory: a stage holds each microbatch at least for the time from there to the loss and back, and for W; bytes
      times seconds have to fit between the device's first forward and the end.
    """
    times, hops, count = task.times, task.hops, task.problem.microbatches
    second = np.minimum(times[WEIGHT], np.maximum(task.backward - times[INPUT], 0.0))  # W's part if I and W run as B
    full = np.minimum(times[INPUT] + times[WEIGHT], task.backward)
    turn = np.minimum(times[INPUT], task.backward)
    forward = np.cumsum(times[FORWARD] + hops)  # end of F of the first microbatch at each stage, at best
    fill = forward - times[FORWARD]
    back = np.cumsum(turn + np.concatenate([[0.0], hops[1:]]))  # from the gradient's arrival at a stage to its end at 0
    whole = forward[-1] + back[-1]
    held = whole - fill - (back - turn)  # from the start of F at a stage to the end of its I, at best
    bound = float(whole + second[0])
    for device, own in enumerate(task.stages_on):
        first, last = own[0], own[-1]
        usable = _usable(task, own, float(task.limits[device]))
        work = count * float((times[FORWARD] + full)[own].sum())
        arrival = float(whole - back[last])  # of the first gradient
        before = min(
            float(arrival - fill[first]),
            count * float(times[FORWARD][own].sum()),
            _most(times[FORWARD][own], task.saved[own], usable),
        )
        after = min(count * float(second[own].sum()), _most(second[own], task.kept[own], usable))
        # The W of stage 0 is other work than the device's own, unless that has stage 0, whose W may be part of a B.
        drain = float(back[first] - turn[first] + second[0]) if first else 0.0
        bound = max(bound, arrival + work - before - after + max(drain, after))
        if 0 < usable < np.inf:
            occupied = task.saved[own] * held[own] + np.minimum(task.saved, task.kept)[own] * second[own]
            bound = max(bound, float(fill[first]) + count * float(occupied.sum()) / usable)
    return bound


def _most(times: Floats, held: Floats, usable: float) -> float:
    """The most seconds of actions whose tensors fit in a device's memory at once."""
    if not times.any():
        return 0.0
    with np.errstate(over="ignore"):  # of tensors that take next to nothing any number fits
        return usable * float(np.divide(times, held, out=np.full_like(times, np.inf), where=held > 0).max())


def _usable(task: Instance, own: Integers, limit: float) -> float:
    """The part of a limit that can be used: if all stages hold equal sizes, a whole multiple of that size."""
    held = task.saved[own]
    same = held[0] > 0 and np.all(held == held[0]) and np.all(task.kept[own] == held[0])
    return float(np.floor(limit / held[0] * (1 + 1e-12)) * held[0]) if same and limit < np.inf else limit
