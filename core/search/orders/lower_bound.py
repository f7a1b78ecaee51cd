"""Lower bounds on the makespan of any order of a problem."""

import numpy as np

from ...evaluate.coding import FORWARD, INPUT, WEIGHT, Floats, Integers
from ...schedules.construction.instance import Instance


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
