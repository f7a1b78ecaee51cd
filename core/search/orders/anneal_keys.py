"""Simulated annealing of a list scheduler's keys: one compiled loop, deterministic for its seed."""

from typing import Any

import numpy as np

from ...numba_cache import njit
from ...schedules.construction.decode import TAIL, decode
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
def _mutate(keys: Any, patience: Any, caps: Any, chunks: int, period: float, reach: float) -> None:
    """Change the keys of one kind, by the same amount or in proportion to the stage (which changes the offset between
    stages, as in a building block); or the patience; or the caps."""
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
def anneal_keys(
    seed: int,
    evaluations: int,
    temperature: float,
    target: float,
    count: int,
    placement: Any,
    stages_on: Any,
    times: Any,
    hops: Any,
    need: Any,
    kept: Any,
    limits: Any,
    keys: Any,
    patience: Any,
    caps: Any,
    fused: Any,
) -> tuple[float, int]:
    """Improve ``keys``, ``patience`` and ``caps`` in place; arguments from ``count`` on as in ``decode``.

    Args:
        seed: of the random numbers.
        evaluations: number of orders to try.
        temperature: the initial one, as a share of the makespan; it falls to 0.
        target: a makespan that ends the search.

    Returns:
        The smallest makespan, and the number of orders tried.
    """
    np.random.seed(seed)
    devices = stages_on.shape[0]
    orders = np.empty((devices, 3 * stages_on.shape[1] * count), dtype=np.int64)
    lengths = np.zeros(devices, dtype=np.int64)
    period = _busiest_s(stages_on, times)
    span, tail = decode(
        count, placement, stages_on, times, hops, need, kept, limits, keys, patience, caps, fused, orders, lengths
    )  # fmt: skip
    best_span, best_value = span, span + TAIL * tail
    value = best_value
    best_keys, best_patience, best_caps = keys.copy(), patience.copy(), caps.copy()
    now_keys, now_patience, now_caps = keys.copy(), patience.copy(), caps.copy()
    tried = 1
    while tried < evaluations and best_span > target:
        progress = tried / evaluations
        new_keys, new_patience, new_caps = now_keys.copy(), now_patience.copy(), now_caps.copy()
        reach = 0.5 if np.random.random() < 0.5 else 0.1
        _mutate(new_keys, new_patience, new_caps, stages_on.shape[1], period, reach)
        while np.random.random() < 0.3:
            _mutate(new_keys, new_patience, new_caps, stages_on.shape[1], period, reach)
        threshold = metropolis(value, temperature * best_span * (1 - progress) ** 2)
        span, tail = decode(
            count, placement, stages_on, times, hops, need, kept, limits, new_keys, new_patience, new_caps,
            fused, orders, lengths, threshold * (1 + 1e-12),
        )  # fmt: skip
        tried += 1
        new = span + TAIL * tail
        if new <= threshold:
            now_keys, now_patience, now_caps, value = new_keys, new_patience, new_caps, new
            if new < best_value:
                best_keys, best_patience, best_caps, best_value = new_keys, new_patience, new_caps, new
                best_span = min(best_span, span)
    keys[:] = best_keys
    patience[:] = best_patience
    caps[:] = best_caps
    return best_span, tried
