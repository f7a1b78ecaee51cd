"""Simulated annealing of a list scheduler's keys: one compiled loop, deterministic for its seed."""

from typing import Any

import numpy as np

from ...numba_cache import njit
from ...schedules.construction.decode import TAIL, Priorities, decode
from ...schedules.construction.shifts import metropolis


@njit()
def _draw_stages(stages: int, chunks: int) -> tuple[int, int]:
    """Draw a range of stages: one, some neighbours, all, or one chunk of every device. Its first stage, and one past
    its last."""
    draw, stage = np.random.random(), np.random.randint(stages)
    if draw < 0.65:
        return stage, stage + 1
    if draw < 0.85:
        return stage, min(stages, stage + 1 + np.random.randint(stages))
    if draw < 0.93:
        return 0, stages
    devices = stages // chunks
    first = stage // devices * devices
    return first, first + devices


@njit()
def _draw_microbatches(count: int) -> tuple[int, int, int]:
    """Draw microbatches: all, every second or third, some neighbours, or one. The first, one past the last, the
    step."""
    draw, first = np.random.random(), np.random.randint(count)
    if draw < 0.3:
        return 0, count, 1
    if draw < 0.5:
        step = 2 + np.random.randint(2)
        return first % step, count, step
    if draw < 0.85:
        return first, min(count, first + 1 + np.random.randint(1 + count // 3)), 1
    return first, first + 1, 1


@njit()
def _mutate(priorities: Any, chunks: int, period: float, reach: float) -> None:
    """Change the keys of one kind, by the same amount or in proportion to the stage (which changes the offset between
    stages, as in a building block); or the patience; or the caps."""
    keys, patience, caps = priorities.keys, priorities.patience, priorities.caps
    kinds, stages, count = keys.shape
    draw, kind = np.random.random(), np.random.randint(kinds)
    size = np.random.standard_normal() * period * reach
    low, high = _draw_stages(stages, chunks)
    if draw < 0.1:
        more = 1 if np.random.random() < 0.5 else -1
        for s in range(low, high):
            caps[s] = max(1, caps[s] + more)
    elif draw < 0.15:
        patience[kind] = max(0.0, min(1.5, patience[kind] + np.random.standard_normal() * 0.3))
    else:
        first, last, step = _draw_microbatches(count)
        sloped = high > low + 1 and np.random.random() < 0.5
        for s in range(low, high):
            share = (s - low) / (high - low) if sloped else 1.0
            keys[kind, s, first:last:step] += size * share


@njit()
def _busiest_s(stages_on: Any, times: Any) -> float:
    """Time of one microbatch on the busiest device."""
    busiest = 0.0
    for d in range(stages_on.shape[0]):
        work = 0.0
        for s in stages_on[d]:
            work += times[:, s].sum()
        busiest = max(busiest, work)
    return busiest


@njit()
def _copied(priorities: Any) -> Any:
    """The priorities in arrays of their own."""
    return Priorities(priorities.keys.copy(), priorities.patience.copy(), priorities.caps.copy())


@njit()
def anneal_keys(
    seed: int, evaluations: int, temperature: float, target: float, given: Any, priorities: Any
) -> tuple[float, int]:
    """Improve priorities in place.

    Args:
        seed: of the random numbers.
        evaluations: number of orders to try.
        temperature: the initial one, as a share of the makespan; it falls to 0.
        target: a makespan that ends the search.
        given: :class:`SchedulerInput`.
        priorities: :class:`Priorities`.

    Returns:
        The smallest makespan, and the number of orders tried.
    """
    np.random.seed(seed)
    devices, chunks = given.stages_on.shape
    orders = np.empty((devices, 3 * chunks * given.microbatches), dtype=np.int64)
    lengths = np.zeros(devices, dtype=np.int64)
    period = _busiest_s(given.stages_on, given.times)
    span, tail = decode(given, priorities, orders, lengths)
    best_span, best_value = span, span + TAIL * tail
    value = best_value
    best, now = _copied(priorities), _copied(priorities)
    tried = 1
    while tried < evaluations and best_span > target:
        progress = tried / evaluations
        new = _copied(now)
        reach = 0.5 if np.random.random() < 0.5 else 0.1
        _mutate(new, chunks, period, reach)
        while np.random.random() < 0.3:
            _mutate(new, chunks, period, reach)
        threshold = metropolis(value, temperature * best_span * (1 - progress) ** 2)
        span, tail = decode(given, new, orders, lengths, threshold * (1 + 1e-12))
        tried += 1
        new_value = span + TAIL * tail
        if new_value <= threshold:
            now, value = new, new_value
            if new_value < best_value:
                best, best_value = new, new_value
                best_span = min(best_span, span)
    priorities.keys[:] = best.keys
    priorities.patience[:] = best.patience
    priorities.caps[:] = best.caps
    return best_span, tried
