"""The reference workload: fixed arithmetic and memory traffic that measures the current speed of the machine.

The speed of a shared or hot machine changes by 10 to 20 % within minutes, so a step that takes longer than predicted is
no evidence against the prediction. The same small workload is therefore timed before and after each profile and each
measurement, on all devices at once. The drift is its present time ÷ its earlier time. A prediction × the drift is the
prediction for the present speed.
"""

import statistics
from collections.abc import Mapping

import torch

from ..devices.compute import Stopwatch
from ..launch.team import Team

PASSES = 16
"""Passes of a reading: about 0.1 s on a CPU. Their mean counts, because slow and fast moments add up in a step, too:
over 40 steps of a GPT-2 on two shared cores, step ÷ reading varied by 10 % with means, by 12 % with medians, and the
steps themselves by 20 %."""
SHARE, PASS_S = 0.1, 6e-3
"""Approximate share of a step that a reading takes, and seconds of a pass on a server core: steps of a few milliseconds
need no readings of 0.1 s. The time of a pass does not depend on the number of passes."""
PRODUCTS, SUMS = 2, 6
"""Matrix products and sums of a pass."""
SIZES = {"cpu": (512, 4 << 20), "cuda": (4096, 64 << 20)}
"""Type of device → rows and columns of the products' operands, and bytes of the sums', which exceed a core's own cache,
or a GPU's. Products and sums take some milliseconds each."""


def workload_bytes(device: torch.device) -> int:
    """Bytes that a reading allocates on a device: two operands of sums, and a matrix with its product.

    Readings run while the device holds its stages, so planning reserves this memory.
    """
    rows, size = _sizes(device)
    return 2 * size + 2 * 4 * rows * rows


def reference_s(team: Team, passes: int = PASSES) -> float:
    """Seconds of a pass of the reference workload at this moment, the same on every rank.

    All devices run it at the same time, as they compute at the same time in a step. All ranks call this together.

    Args:
        team: the devices.
        passes: how many; the mean over them and over the devices is returned.
    """
    team.everywhere(lambda _: None)  # a barrier: otherwise an early rank would measure an idle machine
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
