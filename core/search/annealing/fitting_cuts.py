"""Cuts that fit in memory: if even stages do not fit, the most even stages that do.

Stages are filled one after the other, up to a limit of time and the device's memory. With one stage per device this
finds cuts whenever some exist, because a stage that starts later holds no more. With several stages per device, the
device's memory is divided equally among them, which may miss cuts; the search continues with moves of cuts.
"""

from typing import Any, NamedTuple

import numpy as np

from ...costs.partition import Cuts
from ...numba_cache import njit
from ...timing.coding import BOTH, FORWARD, INFINITY, WEIGHT, Integers
from ...timing.compiled import MICROBATCHES_HELD, START, saved_change
from ..problem.arrays import SAVED, STATE, GraphArrays
from ..problem.setting import Setting

BISECTIONS = 20
"""Halvings of the interval for the longest stage, and for the memory if nothing fits."""
DOUBLINGS = 40
"""Largest number of doublings of the memory until cuts fit in it."""


class Readings(NamedTuple):
    """The tensors and shared parameters that each operator reads: the inverse of ``GraphArrays``' lists of readers.

    Args:
        first, tensor, size: offset of each operator's tensors in the next two, (nodes + 1); the tensor, and its bytes.
        shared_first, shared: the same for shared parameters.
    """

    first: Integers
    tensor: Integers
    size: "np.ndarray"
    shared_first: Integers
    shared: Integers


def readings_of(graph: GraphArrays) -> Readings:
    """The tensors and shared parameters that each operator of a graph reads."""
    nodes = np.arange(graph.sums.shape[2])

    def inverse(first: Integers, reader: Integers) -> tuple[Integers, Integers, Integers]:
        order = np.argsort(reader, kind="stable")
        owner = np.repeat(np.arange(len(first) - 1), np.diff(first))
        return np.searchsorted(reader[order], nodes).astype(np.int64), owner[order].astype(np.int64), order

    tensor_first, tensor, order = inverse(graph.first, graph.reader)
    shared_first, shared, _ = inverse(graph.shared_first, graph.shared_reader)
    return Readings(tensor_first, tensor, graph.size[order], shared_first, shared)


def most_in_flight(orders: Integers, lengths: Integers, stages: int, count: int) -> Integers:
    """Per stage, the largest number of microbatches whose saved tensors exist at once."""
    most = np.zeros(stages, dtype=np.int64)
    for row, length in zip(orders, lengths, strict=True):
        codes = row[:length]
        kinds, stage_of = codes & 3, (codes >> 2) // count
        for stage in np.unique(stage_of):
            own = kinds[stage_of == stage]
            most[stage] = np.cumsum(MICROBATCHES_HELD[own]).max()
    return most


def fitting_cuts(setting: Setting, placement: Integers, flight: Integers, recompute: "np.ndarray") -> tuple[Cuts, bool]:
    """The cuts with the shortest longest stage whose devices are within their limits; and whether such cuts were found.

    If none were found: cuts that fit in the smallest multiple of the devices' memory.

    Args:
        setting: the graph and the devices.
        flight: per stage, the largest number of microbatches in flight (see :func:`most_in_flight`).
    """
    readings, chunks = readings_of(setting.arrays), np.bincount(placement, minlength=setting.devices)
    cuts = np.zeros(len(placement) + 1, dtype=np.int64)
    limits = setting.machine.limits / np.maximum(chunks, 1)

    def fits(longest_s: float, scale: float) -> bool:
        return bool(
            _filled(setting.arrays, setting.machine.kind, readings, placement, flight, recompute, limits * scale,
                    longest_s, cuts)
        )  # fmt: skip

    scale = 1.0
    fit = fits(INFINITY, scale)
    for _ in range(DOUBLINGS):
        if fits(INFINITY, scale):
            break
        scale *= 2
    if not fit:
        scale = _least(lambda middle: fits(INFINITY, middle), scale / 2, scale)
    longest = float(setting.arrays.sums[:, : WEIGHT + 1, -1].sum(axis=1).max())
    fits(_least(lambda middle: fits(middle, scale), 0.0, longest * (1 + 1e-9)), scale)
    return tuple(cuts.tolist()), fit


def _least(holds: Any, low: float, high: float) -> float:
    """About the smallest number in an interval for which ``holds`` is true; it is true for ``high``."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


@njit()
def _filled(
    graph: Any,
    kinds: Any,
    readings: Any,
    placement: Any,
    flight: Any,
    recompute: Any,
    limits: Any,
    longest_s: float,
    cuts: Any,
) -> bool:
    """Fill stages one after the other, each up to ``longest_s`` and its memory limit; return whether all operators are
    in a stage."""
    stages, nodes = placement.shape[0], graph.sums.shape[2] - 1
    got, stage_got = np.zeros(graph.source.shape[0]), np.full(graph.source.shape[0], -1, dtype=np.int64)
    replica = np.full(graph.shared_size.shape[0], -1, dtype=np.int64)
    cuts[0] = 0
    for s in range(stages):
        start, d = cuts[s], placement[s]
        end, t = start, kinds[d]
        sums = graph.sums[t]
        workspace, received, replicas = 0.0, 0.0, 0.0
        while end < nodes - (stages - s - 1):
            workspace = max(workspace, graph.largest[t, 0, end])
            for r in range(readings.shared_first[end], readings.shared_first[end + 1]):
                p = readings.shared[r]
                if replica[p] != s and graph.shared_reader[graph.shared_first[p]] < start:
                    replica[p] = s
                    replicas += graph.shared_size[p]
            for r in range(readings.first[end], readings.first[end + 1]):
                tensor = readings.tensor[r]
                if graph.source[tensor] < start:
                    had = got[tensor] if stage_got[tensor] == s else 0.0
                    got[tensor], stage_got[tensor] = max(had, readings.size[r]), s
                    received += got[tensor] - had
            time = 0.0
            for kind in range(WEIGHT + 1):
                time += sums[kind, end + 1] - sums[kind, start]
            saved = sums[SAVED, end + 1] - sums[SAVED, start]
            held = flight[s] * saved_change(recompute[s], START, FORWARD, saved, received, saved)
            held += max(saved_change(recompute[s], START, BOTH, saved, received, saved), 0.0)
            held += sums[STATE, end + 1] - sums[STATE, start] + replicas + workspace
            if time > longest_s or held > limits[d]:
                break
            end += 1
        if end == start:
            return False
        cuts[s + 1] = end
    return bool(cuts[stages] == nodes)
