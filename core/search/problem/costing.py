"""Costs of stages and the edges between them, from cuts: compiled, with precomputed sums over the graph.

A search evaluates many thousands of cuts. A stage's times and sizes are differences of prefix sums; its workspace is
the maximum of two overlapping entries of a sparse table; an edge's bytes are those of each crossing tensor, once per
later stage that reads it. Memory is linear in operators and edges (times the logarithm of the operators). Parameters
that replicas share count as workspace: they are whole at least while their stage computes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...costs.costs import StageCosts, StageEdge
from ...numba_cache import njit
from ...timing.coding import BOTH, FORWARD, INPUT, WEIGHT, Integers
from ...timing.compiled import StageArrays, fill_saved
from .arrays import GATHERED, GRADIENT_BYTES, OPTIMIZER, SAVED, STATE, MachineArrays


def fill_fixed(
    costs: Sequence[StageCosts],
    edges: Sequence[StageEdge],
    placement: Integers,
    recompute: "np.ndarray",
    machine: MachineArrays,
    out: StageArrays,
    summed: Sequence[int] | None = None,
) -> None:
    """Fill ``out`` with given costs and edges.

    Args:
        recompute: whether a stage runs its forward again before its backward.
        out: filled.
        summed: bytes of the gradients that the replicas of each stage sum; by default those that one replica has.
    """
    for s, cost in enumerate(costs):
        out.times[:, s] = cost.forward_s, cost.backward_input_s, cost.backward_weight_s, cost.full_backward_s
        out.second_forward[s] = cost.second_forward_s if recompute[s] else 0.0
        out.optimizer[s], out.state[s] = cost.optimizer_s, cost.state_bytes
        out.workspace[s] = cost.workspace_bytes + cost.gathered_bytes
        fill_saved(out, s, bool(recompute[s]), float(cost.saved_bytes), float(cost.input_bytes), float(cost.kept_bytes))
        fill_collectives(machine, placement, s, float(cost.gradient_bytes if summed is None else summed[s]), out)
    forward = sorted((e.dst, e.src, e.bytes) for e in edges)
    back = sorted((e.src, e.dst, e.gradient_bytes) for e in edges if e.gradient_bytes > 0)
    for rows, first, sources, delays, sizes in (
        (forward, out.forward_first, out.forward_from, out.forward_delay, out.forward_bytes),
        (back, out.back_first, out.back_from, out.back_delay, out.back_bytes),
    ):
        first[:] = 0
        for e, (reader, source, size) in enumerate(rows):
            a, b = placement[source], placement[reader]
            first[reader + 1] += 1
            sources[e], delays[e], sizes[e] = source, machine.latency[a, b] + size / machine.rate[a, b], size
            if a != b:
                _take(machine, out.times, source, reader, size, rows is back)
        np.cumsum(first, out=first)


@njit()
def fill_collectives(machine: Any, placement: Any, s: Any, size: Any, out: Any) -> None:
    """Fill in the times of a stage's collectives over replicas, of gradients of this many bytes."""
    d, moves = placement[s], size > 0
    out.reduce[s] = machine.reduce[0, d] + size * machine.reduce[1, d] if moves else 0.0
    out.scatter[s] = out.gather[s] = -1.0
    if machine.scatter.shape[1] > 0:
        out.scatter[s] = machine.scatter[0, d] + size * machine.scatter[1, d] if moves else 0.0
    if machine.gather.shape[1] > 0:
        out.gather[s] = machine.gather[0, d] + size * machine.gather[1, d] if moves else 0.0


@njit()
def _take(machine: Any, times: Any, one: Any, other: Any, size: Any, gradient: bool) -> None:
    """Add the time of a message on both of its stages: an output's to F, a gradient's to I and B."""
    seconds = machine.message[0] + size * machine.message[1]
    if seconds == 0:
        return
    for s in (one, other):
        if gradient:
            times[INPUT, s] += seconds
            times[BOTH, s] += seconds
        else:
            times[FORWARD, s] += seconds


@njit()
def cost_stages(graph: Any, machine: Any, placement: Any, cuts: Any, recompute: Any, out: Any) -> None:
    """Fill ``out`` with costs and edges of the stages of some cuts.

    Args:
        graph: :class:`GraphArrays`.
        machine: :class:`MachineArrays`.
        cuts: (stages + 1).
        recompute: whether a stage runs its forward again before its backward.
        out: :class:`StageArrays`, filled.
    """
    stages = placement.shape[0]
    stage_of, gradients, saved = np.empty(cuts[stages], dtype=np.int64), np.zeros(stages), np.zeros(stages)
    for s in range(stages):
        low, high = cuts[s], cuts[s + 1]
        stage_of[low:high] = s
        t = machine.kind[placement[s]]
        sums = graph.sums[t]
        for kind in range(3):
            out.times[kind, s] = sums[kind, high] - sums[kind, low]
        out.times[BOTH, s] = out.times[INPUT, s] + out.times[WEIGHT, s]
        out.optimizer[s] = sums[OPTIMIZER, high] - sums[OPTIMIZER, low]
        out.state[s] = sums[STATE, high] - sums[STATE, low]
        saved[s] = sums[SAVED, high] - sums[SAVED, low]
        gradients[s] = sums[GRADIENT_BYTES, high] - sums[GRADIENT_BYTES, low]
        level = 0
        while (2 << level) <= high - low:
            level += 1
        out.workspace[s] = max(graph.largest[t, level, low], graph.largest[t, level, high - (1 << level)])
        out.workspace[s] += sums[GATHERED, high] - sums[GATHERED, low]
    for p in range(graph.shared_size.shape[0]):
        last = -1
        for r in range(graph.shared_first[p], graph.shared_first[p + 1]):
            s = stage_of[graph.shared_reader[r]]
            if last >= 0 and s != last:
                out.state[s] += graph.shared_size[p]
                gradients[s] += graph.shared_gradient[p]
            last = s
    forward = out.times[FORWARD].copy()
    received = _edges(graph, machine, placement, stage_of, out)
    for s in range(stages):
        fill_collectives(machine, placement, s, gradients[s], out)
        out.second_forward[s] = forward[s] if recompute[s] else 0.0
        fill_saved(out, s, recompute[s], saved[s], received[s], saved[s])


@njit()
def _edges(graph: Any, machine: Any, placement: Any, stage_of: Any, out: Any) -> Any:
    """Fill in the edges by reading stage: collected by source stage first, then sorted by counting.

    Returns:
        Bytes that each stage receives.
    """
    stages, most = placement.shape[0], out.forward_from.shape[0]
    source, target = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    size, back = np.empty(most), np.empty(most)
    slot = np.full(stages, -1, dtype=np.int64)
    found, begun, current = 0, 0, -1
    for t in range(graph.source.shape[0]):
        s = stage_of[graph.source[t]]
        low, high = graph.first[t], graph.first[t + 1]
        if stage_of[graph.reader[high - 1]] == s:
            continue
        if s != current:
            for e in range(begun, found):
                slot[target[e]] = -1
            begun, current = found, s
        r = low
        while r < high:
            reader = stage_of[graph.reader[r]]
            forward, gradient = 0.0, 0.0
            while r < high and stage_of[graph.reader[r]] == reader:
                forward = max(forward, graph.size[r])
                gradient = max(gradient, graph.back[r])
                r += 1
            if reader == s:
                continue
            if slot[reader] < 0:
                slot[reader] = found
                source[found], target[found], size[found], back[found] = s, reader, 0.0, 0.0
                found += 1
            size[slot[reader]] += forward
            back[slot[reader]] += gradient
    return _by_reader(machine, placement, source[:found], target[:found], size, back, out)


@njit()
def _by_reader(machine: Any, placement: Any, source: Any, target: Any, size: Any, back: Any, out: Any) -> Any:
    """Fill ``out`` with edges sorted by reader, forward and back; return the bytes that each stage receives."""
    stages = placement.shape[0]
    received = np.zeros(stages)
    out.forward_first[:] = 0
    out.back_first[:] = 0
    for e in range(source.shape[0]):
        received[target[e]] += size[e]
        out.forward_first[target[e] + 1] += 1
        if back[e] > 0:
            out.back_first[source[e] + 1] += 1
    for s in range(stages):
        out.forward_first[s + 1] += out.forward_first[s]
        out.back_first[s + 1] += out.back_first[s]
    forward_at, back_at = out.forward_first.copy(), out.back_first.copy()
    for e in range(source.shape[0]):
        a, b = placement[source[e]], placement[target[e]]
        if a != b:
            _take(machine, out.times, source[e], target[e], size[e], False)
            if back[e] > 0:
                _take(machine, out.times, source[e], target[e], back[e], True)
        at = forward_at[target[e]]
        out.forward_from[at] = source[e]
        out.forward_delay[at] = machine.latency[a, b] + size[e] / machine.rate[a, b]
        out.forward_bytes[at] = size[e]
        forward_at[target[e]] += 1
        if back[e] > 0:
            at = back_at[source[e]]
            out.back_from[at] = target[e]
            out.back_delay[at] = machine.latency[b, a] + back[e] / machine.rate[b, a]
            out.back_bytes[at] = back[e]
            back_at[source[e]] += 1
    return received
