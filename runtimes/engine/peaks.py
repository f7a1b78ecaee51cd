"""The largest magnitude of each tensor that a stage returns for others: NaN or infinite if one of its values is.

They stay on the device, so that no step waits for them. They are read only after a loss that is not finite, to find the
stage and the microbatch where that began (`training/non_finite`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Peaks = dict[tuple[int, int], list[Tensor | None]]
"""(stage, microbatch) → for each output of F its largest magnitude, a scalar; None for one without floats."""

_FLOATS = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip


def peaks_of(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The largest magnitude of each tensor.

    A norm neither overflows nor allocates memory of the tensor's size, as a sum and ``isfinite`` would.
    """
    places = [i for i, output in enumerate(outputs) if output.dtype in _FLOATS and output.numel()]
    found: list[Tensor | None] = [None] * len(outputs)
    if places:
        for place, peak in zip(places, torch._foreach_norm([outputs[i] for i in places], math.inf), strict=True):
            found[place] = peak
    return found
