"""The reference workload: fixed arithmetic and memory traffic, by which the machine's speed at a moment is known.

A machine that others share, or that gets warm, is 10 to 20 % faster or slower a few minutes later. A step that takes
longer than predicted then says little about the prediction. So the same small workload is timed around what is profiled
and around what is measured, on all devices at once: what it takes now ÷ what it took then is the drift. A prediction
times the drift is what it would have been, had it been made now.
"""

import statistics
from collections.abc import Mapping

import torch

from ..devices.compute import Stopwatch
from ..launch.team import Team

PASSES = 16
"""Passes of a reading: about 0.1 s of a CPU. Their mean counts, as a step takes the sum of its slow and fast moments:
over 40 steps of a GPT-2 on two shared cores, step ÷ reading varied by 10 % with means, by 12 % with medians, and the
steps themselves by 20 %."""
SHARE, PASS_S = 0.1, 6e-3
"""About what share of a step a reading around it takes, and seconds of a pass on a core of a server: steps of a few
milliseconds need no readings of 0.1 s. How many passes there are is no part of what is measured."""
PRODUCTS, SUMS = 2, 6
"""Matrix products and sums of a pass."""
SIZES = {"cpu": (512, 4 << 20), "cuda": (4096, 64 << 20)}
"""Type of device → rows and columns of the products' operands, and bytes of the sums', which are more than a core's own
cache, or a GPU's: each of the two some milliseconds."""


def workload_bytes(device: torch.device) -> int:
    """Bytes that a reading allocates on a device: two operands of sums, and a matrix with its product. It is read while
    the device holds its stages, so they have to leave it that much."""
    rows, size = _sizes(device)
    return 2 * size + 2 * 4 * rows * rows


def reference_s(team: Team, passes: int = PASSES) -> float:
    """Seconds of a pass of the reference workload at this moment, the same on every rank.

    All devices run it at the same time, as they compute at the same time in a step. All ranks call this together.

    Args:
        team: the devices.
        passes: how many; the mean over them and over the devices is returned.
    """
    team.everywhere(lambda _: None)  # or a rank that comes early would find the machine idle
    where = team.where or dict.fromkeys(team.local, torch.device("cpu"))
    return statistics.fmean(team.everywhere(lambda device: _reading(where, device, passes)))


def passes_around(step_s: float) -> int:
    """Passes of a reading next to a step of this many seconds."""
    return max(1, min(PASSES, round(SHARE * step_s / PASS_S)))


def _reading(where: Mapping[int, torch.device], device: int, passes: int) -> float:
    here = where[device]
    watch = Stopwatch(here)
    with watch.active(), torch.no_grad():
        rows, size = _sizes(here)
        matrix = torch.full((rows, rows), 1 / rows, device=here)
        total, terms = (torch.zeros(size // 4, device=here) for _ in range(2))
        spans = []
        for _ in range(1 + passes):  # the first one touches the memory
            start = watch.now()
            for _ in range(PRODUCTS):
                torch.mm(matrix, matrix)
            for _ in range(SUMS):
                total.add_(terms)
            spans.append((start, watch.now()))
        return statistics.fmean(watch.between(*span) for span in spans[1:])


def _sizes(device: torch.device) -> tuple[int, int]:
    return SIZES[device.type] if device.type in SIZES else SIZES["cpu"]
