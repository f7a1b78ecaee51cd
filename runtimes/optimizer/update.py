"""The update of a step, from the last backward to the optimizer steps: averaging, unscaling, clipping, stepping.

    last backward ─▶ REDUCE_GRAD ──────▶ REDUCE_TIED ─────▶ SYNC ──────────────▶ STEP
                     sums over replicas    of tied weights    norm, overflow        clip, step, or skip

SYNC is one all-reduce of a table over the stages of a replica::

    │ number of devices with a non-finite gradient │ sum of loss scales │ norm of each gradient │ … │

Every device computes the global norm (`clipping`) from this table. After the reductions all replicas have the same
gradients, also non-finite ones, and therefore the same table.

The gradients are written once, multiplied by clipping factor ÷ (sum of weights · loss scale): in STEP with clipping, in
SYNC with loss scaling alone, and otherwise before both. With clipping, a norm that is not finite is an overflow: it
would make every parameter NaN.

All of it stays on the device, and the host runs ahead. Only with a scaler, or where a norm that is not finite stops the
update, the host must know whether to step at all; as in torch, an optimizer that supports ``found_inf`` (a fused one)
skips a step with a scaler by itself.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum

import torch
from attrs import define, field
from torch import Tensor

from ...backends.contract import Backend
from ...core.plan.plan import Plan
from ..lazy_value import LazyValue
from .clipping import NormParameters, clipping_factor
from .scaling import check_agreed, unscale
from .stage_state import StageState

StartRead = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to copy a tensor to the host, and returns what waits for it: `ComputeQueue.start_read`."""

NonFiniteNorm = tuple[float, int, str]
"""A norm that is not finite, and a parameter whose gradient is not: its stage and its name, "" for none."""


class Ending(Enum):
    """The end of a step: with an update, or with gradients that wait for more batches."""

    STEP = "step"
    KEEP = "keep"


@define(eq=False)
class Update:
    """One device's part of the update.

    Args:
        plan: has whether stages wait for each other (``sync``).
        states: of this device's stages, by index.
        norm_parameters: the parameters of the global norm.
        clip_norm: the maximum of the global norm; None without clipping.
        where: the device of the tensors.
        replicas: the transport to this device's replicas that is open now; None for one replica.
        needs_finite_norm: whether no stage steps if the norm is not finite, also without loss scaling.

    Attributes:
        norm: the global norm of the last update's gradients, before clipping; None without clipping.
    """

    plan: Plan
    states: Mapping[int, StageState]
    norm_parameters: NormParameters
    clip_norm: float | None
    where: torch.device
    replicas: Backend | None = None
    needs_finite_norm: bool = False
    norm: Tensor | None = field(default=None, init=False)
    _divisor: Tensor | float = field(default=1.0, init=False)
    _scale: float | None = field(default=None, init=False)
    _scales: list[tuple[Tensor, int]] = field(factory=list, init=False)
    _overflows: Tensor | None = field(default=None, init=False)
    _overflow: bool | None = field(default=None, init=False)
    _norms: Tensor | None = field(default=None, init=False)
    _refused: bool = field(default=False, init=False)

    def begin(
        self,
        divisor: Tensor | float,
        scale: float | None,
        scales: tuple[Tensor, int] | None = None,
        refused: bool = False,
    ) -> None:
        """Begin an update, of gradients that are sums.

        Args:
            divisor: of the sums; the quotient is their average.
            scale: the factor of the losses, by which SYNC divides; None without loss scaling.
            scales: the sum of all replicas' scales, and the number of replicas; None for one replica, or without loss
                scaling.
            refused: whether no stage steps, for any gradients.
        """
        self._refused = refused
        self.norm, self._scale, self._scales = None, scale, [] if scales is None else [scales]
        self._overflows, self._overflow, self._divisor = None, None, divisor
        if scale is None and self.clip_norm is None and (isinstance(divisor, Tensor) or divisor != 1):
            for state in self.states.values():
                state.divide_gradients(divisor)

    @property
    def has_no_stage(self) -> bool:
        """Whether this device has no stage, and so no SYNC in its actions, in a plan whose stages have one."""
        return self.plan.sync and not self.states

    def sync(self, backend: Backend) -> None:
        """SYNC: exchange overflow, loss scale and norms over all stages."""
        scale, own = self._scale, [p for state in self.states.values() for p in state.updated.values()]
        scaled = torch.full((), scale or 0.0, dtype=torch.float64, device=self.where)
        found, norms = torch.zeros_like(scaled), list[Tensor]()
        if self.clip_norm is not None:
            norms = self.norm_parameters.norms(self.states, self.where)
            if scale is not None and norms:
                found = (~torch.stack(norms).isfinite()).any().double()
        elif scale is not None:
            found = unscale(own, self._factor(torch.float64), self.where)
        in_parts = any(state.sharing is not None or state.split for state in self.states.values())
        if self.replicas is not None and in_parts:
            norms, found = self.norm_parameters.over_parts(norms, found, self.states, self.replicas)
        table = torch.stack([found, scaled, *norms])
        backend.all_reduce(table).wait()
        if scale is not None:
            self._scales.append((table[1], backend.devices))
            self._overflows = table[0]
        if self.clip_norm is not None:
            self._norms = table[2:]
            norm = self.norm_parameters.global_norm(self._norms)
            self.norm = norm * self._factor(norm.dtype)

    def _factor(self, dtype: torch.dtype) -> Tensor | float:
        """The factor on the gradients before clipping: a number, or a scalar on their device."""
        scale = 1.0 if self._scale is None else self._scale
        inverse = 1 / scale if scale else math.inf
        divisor = self._divisor
        if isinstance(divisor, Tensor):
            return inverse / divisor.to(self.where, dtype)
        return inverse / divisor if divisor else math.inf  # as with a tensor, if all weights are the constant 0

    @property
    def overflow(self) -> bool:
        """Whether a gradient of any stage was not finite, so that no stage steps.

        False where neither a scaler nor `needs_finite_norm` stops an update. The host waits for the device, once in
        each update.

        Raises:
            RequestError: the loss was not scaled by the same number everywhere.
        """
        if self._scale is None and self.needs_finite_norm and self.norm is not None:
            if self._overflow is None:
                self._overflow = not bool(self.norm.isfinite())
            return self._overflow
        if self._scale is None or self._overflows is None:
            return False
        if self._overflow is None:
            overflows, *totals = torch.stack([self._overflows, *(total for total, _ in self._scales)]).tolist()
            for total, (_, members) in zip(totals, self._scales, strict=True):
                check_agreed(total, self._scale, members)
            self._overflow = overflows > 0
        return self._overflow

    def non_finite_norm(self, start_read: StartRead) -> LazyValue[NonFiniteNorm | None]:
        """The global norm of this update if it is not finite, with the parameter that the backward reached first of
        those whose gradients are not finite. None if the norm is finite or was not measured.

        Args:
            start_read: starts to copy a tensor to the host.
        """
        if self.norm is None or self._norms is None:
            return LazyValue(lambda: None)
        copy, parameters = start_read(torch.stack([self.norm.double(), *self._norms])), self.norm_parameters.parameters

        def read() -> NonFiniteNorm | None:
            norm, *norms = copy().tolist()
            if math.isfinite(norm):
                return None
            bad = [number for number, each in enumerate(norms) if not math.isfinite(each)]
            stage, name, _ = parameters[bad[-1] if bad else 0]
            return norm, stage, name if bad else ""

        return LazyValue(read)

    def step(self, state: StageState) -> None:
        """STEP of a stage: clip its gradients, and step, unless gradients anywhere are not finite."""
        if self._refused:
            return
        if self.norm is not None and self.clip_norm is not None:
            clipping = clipping_factor(self.norm, self.clip_norm)
            state.multiply_gradients(clipping * self._factor(clipping.dtype))
        if self._overflows is not None and state.handles_found_inf:
            state.step((self._overflows > 0).float())
        elif not self.overflow:
            state.step()
