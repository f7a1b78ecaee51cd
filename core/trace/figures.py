"""Figures of one trace: the bubble of each device, and its peak memory by kind."""

from collections.abc import Iterable

from ..actions import WORK_KINDS
from ..ratios import bubble_ratio
from .trace import HOST_MEMORY, MEMORY_KINDS, Trace

TOTAL = "total"
"""Name of the sum over all kinds of memory."""


def bubble_per_device(trace: Trace) -> tuple[float, ...]:
    """1 − time in F, B, I, W and RECOMPUTE ÷ step time, per device; 0 for a step that takes no time."""
    busy = [0.0] * trace.devices
    for event in trace.events:
        if event.action.kind in WORK_KINDS:
            busy[event.device] += event.end_s - event.start_s
    return tuple(bubble_ratio(time, trace.step_s) for time in busy)


def memory_kinds(trace: Trace) -> tuple[str, ...]:
    """The kinds of the devices' own memory that a trace has samples of, in their usual order."""
    found = {sample.kind for sample in trace.memory} - {HOST_MEMORY}
    return (*(kind for kind in MEMORY_KINDS if kind in found), *sorted(found - set(MEMORY_KINDS)))


def peak_memory(trace: Trace, kinds: Iterable[str]) -> tuple[dict[str, float], ...]:
    """Per device the peak of each kind, and of the sum (``total``) over the device's own memory, in bytes.

    Samples of one device at one time take effect together, so that bytes that only change their kind count once.
    """
    kinds = tuple(kinds)
    held: list[dict[str, float]] = [dict.fromkeys(kinds, 0.0) for _ in range(trace.devices)]
    peaks = [dict.fromkeys((*kinds, TOTAL), 0.0) for _ in range(trace.devices)]
    by_device: list[list[int]] = [[] for _ in range(trace.devices)]
    for index, sample in enumerate(trace.memory):
        if sample.kind in kinds:
            by_device[sample.device].append(index)
    for device, indices in enumerate(by_device):
        now, peak = held[device], peaks[device]
        for position, index in enumerate(indices):
            sample = trace.memory[index]
            now[sample.kind] = sample.bytes
            last = position + 1 == len(indices) or trace.memory[indices[position + 1]].time_s > sample.time_s
            if last:
                for kind in kinds:
                    peak[kind] = max(peak[kind], now[kind])
                peak[TOTAL] = max(peak[TOTAL], sum(size for kind, size in now.items() if kind != HOST_MEMORY))
    return tuple(peaks)
