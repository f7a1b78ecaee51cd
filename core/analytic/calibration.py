"""Fitting a device's efficiencies and launch overhead to measured operators.

Least squares on the logarithm of predicted over measured time: an error of 10 % has the same weight for a large and a
small operator. The loss is linear for outliers.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ..cluster.device_type import COMPUTE_KINDS, MEMORY_KINDS, DeviceType
from ..errors import RequestError
from .kernels import Kernel
from .roofline import kernels_s, peak_s

Floats = NDArray[np.float64]

LEAST_EFFICIENCY, LEAST_LAUNCH_S, MOST_LAUNCH_S = 1e-4, 1e-8, 1e-2
OUTLIER = 0.3
"""The relative error above which the loss is linear instead of quadratic."""


@frozen
class Sample:
    """A measured operator.

    Args:
        name: a name for display.
        case: samples of one case, such as its F and its backward, are held out together.
        kernels: the kernels that it ran.
        seconds: its measured time.
    """

    name: str
    case: str
    kernels: tuple[Kernel, ...]
    seconds: float

    @property
    def kind(self) -> str:
        """The kind of the kernel with the most FLOPs, then bytes."""
        return max(self.kernels, key=lambda kernel: (kernel.flops, kernel.bytes)).kind


@frozen
class Residual:
    """A sample and its predictions.

    Args:
        sample: the measurement.
        fitted_s: predicted by the device type fitted to all samples.
        held_out_s: predicted by a device type fitted to all other cases.
    """

    sample: Sample
    fitted_s: float
    held_out_s: float

    @property
    def error(self) -> float:
        """Relative error of the held-out prediction."""
        return abs(self.held_out_s / self.sample.seconds - 1)

    @property
    def fitted_error(self) -> float:
        """Relative error of the fit."""
        return abs(self.fitted_s / self.sample.seconds - 1)


@frozen(slots=False)
class Calibration:
    """A fitted device type.

    Args:
        device: the type with fitted numbers; their sources are still the old ones.
        residuals: of every sample.
        fitted: names, as in `DeviceType.sources`, of the numbers that the samples determine; the others are unchanged.
    """

    device: DeviceType
    residuals: tuple[Residual, ...]
    fitted: tuple[str, ...] = field(default=())

    @cached_property
    def by_kind(self) -> Mapping[str, tuple[Residual, ...]]:
        """The residuals of every kind that was measured."""
        kinds = [kind for kind in (*COMPUTE_KINDS, *MEMORY_KINDS) if any(r.sample.kind == kind for r in self.residuals)]
        return {kind: tuple(r for r in self.residuals if r.sample.kind == kind) for kind in kinds}

    @property
    def median_error(self) -> float:
        """Median held-out error over all samples."""
        return statistics.median(residual.error for residual in self.residuals)


def calibrate(samples: Sequence[Sample], base: DeviceType, products: str = "") -> Calibration:
    """Fit a device type to samples.

    Args:
        samples: measured operators; the efficiency of a kind without samples is unchanged.
        base: its peak rates are unchanged; its efficiencies are the starting point of the search.
        products: the number type in which products ran, see `rate_of`.

    Operators are measured in isolation: the share that training sustains of their rates is the base's, and not fitted.

    Raises:
        RequestError: too few samples, a time that is not above 0, or a number type for which the device has no rate.
    """
    wrong = next((s for s in samples if not (s.seconds > 0 and s.kernels)), None)
    if wrong is not None:
        raise RequestError(
            f"'{wrong.name}' took {wrong.seconds} s in {len(wrong.kernels)} kernels: a sample needs a time above 0 and "
            "at least one kernel"
        )
    cases = list(dict.fromkeys(sample.case for sample in samples))
    if len(cases) < 3:
        raise RequestError(f"{len(cases)} cases were measured: a fit, and one without each of them, needs at least 3")
    isolated = evolve(base, sustained=None)
    device, determined = _Fit(samples, isolated, products).device()
    held_out: dict[str, float] = {}
    for case in cases:
        rest, _ = _Fit([sample for sample in samples if sample.case != case], isolated, products).device(device)
        held_out |= {s.name: kernels_s(s.kernels, rest, products) for s in samples if s.case == case}
    residuals = tuple(Residual(s, kernels_s(s.kernels, device, products), held_out[s.name]) for s in samples)
    return Calibration(evolve(device, sustained=base.sustained), residuals, determined)


class _Fit:
    """One fit: the samples' kernels as arrays, and the numbers to fit."""

    def __init__(self, samples: Sequence[Sample], base: DeviceType, products: str) -> None:
        self._base = base
        pairs = [(i, kernel) for i, sample in enumerate(samples) for kernel in sample.kernels]
        present = {kernel.kind for _, kernel in pairs}
        self._kinds = [kind for kind in (*COMPUTE_KINDS, *MEMORY_KINDS) if kind in present]
        self._sample = np.array([i for i, _ in pairs])
        self._kind = np.array([self._kinds.index(kernel.kind) for _, kernel in pairs])
        self._limited = np.array([kernel.kind in COMPUTE_KINDS for _, kernel in pairs])
        self._arithmetic_s = np.array([peak_s(kernel, base, products) for _, kernel in pairs])
        self._memory_s = np.array([kernel.bytes / base.peak_memory_bytes_per_s for _, kernel in pairs])
        self._measured = np.log([sample.seconds for sample in samples])

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the numbers to fit, in order."""
        return (*(f"efficiency.{kind}" for kind in self._kinds), "effective_memory_bytes_per_s", "launch_overhead_s")

    def _errors(self, x: Floats) -> Floats:
        """Logarithms of predicted ÷ measured time.

        Args:
            x: logarithms of efficiencies, of the share of the bandwidth, and of the launch.
        """
        numbers = np.exp(x)
        efficiency, share, launch_s = numbers[:-2][self._kind], numbers[-2], numbers[-1]
        arithmetic_s = np.where(self._limited, self._arithmetic_s / efficiency, self._arithmetic_s)
        memory_s = self._memory_s / np.where(self._limited, share, efficiency)
        seconds = np.bincount(self._sample, launch_s + np.maximum(arithmetic_s, memory_s), len(self._measured))
        return np.asarray(np.log(seconds) - self._measured)

    def device(self, start: DeviceType | None = None) -> tuple[DeviceType, tuple[str, ...]]:
        """The base with the best-fitting numbers, searched from ``start``; and the names that the samples determine."""
        begin = start or self._base
        share = begin.effective_memory_bytes_per_s / begin.peak_memory_bytes_per_s
        numbers = [*(begin.efficiency[kind] for kind in self._kinds), share, begin.launch_overhead_s]
        low = np.log([*[LEAST_EFFICIENCY] * (len(numbers) - 1), LEAST_LAUNCH_S])
        high = np.log([*[1.0] * (len(numbers) - 1), MOST_LAUNCH_S])
        first = np.clip(np.log(np.maximum(numbers, LEAST_LAUNCH_S)), low + 1e-6, high - 1e-6)
        found = least_squares(self._errors, first, bounds=(low, high), loss="soft_l1", f_scale=OUTLIER, xtol=1e-10)
        determined = np.abs(found.jac).max(axis=0) > 0
        values = np.where(determined, np.exp(found.x), numbers)
        names = tuple(name for name, known in zip(self._names, determined, strict=True) if known)
        *fitted, share, launch_s = (float(value) for value in values)
        return evolve(
            self._base,
            efficiency={**self._base.efficiency, **dict(zip(self._kinds, fitted, strict=True))},
            launch_overhead_s=launch_s,
            effective_memory_bytes_per_s=share * self._base.peak_memory_bytes_per_s,
        ), names
