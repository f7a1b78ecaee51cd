"""Lower bounds on the makespan of any order of a problem."""

import numpy as np

from ...evaluate.coding import FORWARD, INPUT, WEIGHT, Integers
from ...schedules.construction.instance import Instance


def lower_bound(task: Instance) -> float:
    """A lower bound on the makespan of every order of these stages on these devices.

    The largest, over the devices, of
    - fill and work: a device starts after the forwards of all stages before its first one, and then runs all of its F,
      I and W;
    - fill, work and drain: all F and I of a device come before the last I of its first stage; after it the gradient
      passes through all earlier stages, and stage 0 runs its W;
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
        first = own[0]
        work = count * float((times[FORWARD] + full)[own].sum())
        bound = max(bound, float(fill[first]) + work)
        drain = float(back[first] - turn[first] + second[0])
        bound = max(bound, float(fill[first] + count * (times[FORWARD] + turn)[own].sum()) + drain)
        usable = _usable(task, own, float(task.limits[device]))
        if 0 < usable < np.inf:
            occupied = task.saved[own] * held[own] + np.minimum(task.saved, task.kept)[own] * second[own]
            bound = max(bound, float(fill[first]) + count * float(occupied.sum()) / usable)
    return bound


def _usable(task: Instance, own: Integers, limit: float) -> float:
    """The part of a limit that can be used: if all stages hold equal sizes, a whole multiple of that size."""
    held = task.saved[own]
    same = held[0] > 0 and np.all(held == held[0]) and np.all(task.kept[own] == held[0])
    return float(np.floor(limit / held[0] * (1 + 1e-12)) * held[0]) if same and limit < np.inf else limit
