"""Copies between a GPU and the host's memory, pinned and pageable."""

import statistics
from collections.abc import Sequence

import torch
from attrs import frozen

from ...backends.streams import streams_of
from ...core.cluster.links.lines import LineFit, fit_line
from ...core.plain_data import exchanged
from .compute import Stopwatch

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
"""Bytes of a copy: up to the saved tensors of a stage."""


@exchanged
@frozen
class MeasuredCopy:
    """One kind of copy.

    Args:
        to_host: the direction.
        pinned: whether the host's memory is page-locked.
        line: its time by size.
    """

    to_host: bool
    pinned: bool
    line: LineFit


def host_copies(device: torch.device, sizes: Sequence[int] = SIZES, repeats: int = 10) -> list[MeasuredCopy]:
    """Measure both directions, pinned and pageable; empty if the device is the CPU.

    Args:
        sizes: bytes of the copies.
    """
    if streams_of(device) is None:
        return []
    found = []
    for to_host in (False, True):
        for pinned in (True, False):
            times = [_copy_s(device, size, to_host, pinned, repeats) for size in sizes]
            found.append(MeasuredCopy(to_host, pinned, fit_line(sizes, times)))
    return found


def _copy_s(device: torch.device, size: int, to_host: bool, pinned: bool, repeats: int) -> float:
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    target, source = (here, there) if to_host else (there, here)
    watch, times = Stopwatch(device), []
    with watch.active():
        for _ in range(repeats + 1):
            start = watch.now()
            target.copy_(source, non_blocking=True)
            times.append(watch.between(start, watch.now()))
    return statistics.median(times[1:])
