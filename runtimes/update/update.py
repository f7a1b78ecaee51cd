"""The update of a step, from the last backward to the optimizer steps: averaging, unscaling, clipping, stepping.

    last backward ─▶ REDUCE_GRAD ──────▶ REDUCE_TIED ─────▶ SYNC ──────────────▶ STEP
                     sums over replicas    of tied weights    norm, overflow        clip, step, or skip

SYNC is one all-reduce of a table over the stages of a replica::

    │ number of devices with a non-finite gradient │ sum of loss scales │ norm of each gradient │ … │

Every device computes the global norm from this table, in the model's order under any plan. Of sharded stages each
replica has slices (`shards`), whose norms are added over the replicas first. After the reductions all replicas have the
same gradients, also non-finite ones, and therefore the same table.

The gradients are written once, multiplied by clipping factor ÷ (sum of weights · loss scale): in STEP with clipping, in
SYNC with loss scaling alone, and otherwise before both. With clipping, a norm that is not finite is an overflow: it
would make every parameter NaN.

All of it stays on the device, and the host runs ahead. Only with a scaler, or where a norm that is not finite stops the
update, the host must know whether to step at all; as in torch, an optimizer that supports ``found_inf`` (a fused one)
skips a step with a scaler by itself.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ..metrics import LazyValue
from .stage_state import StageState
from .training import unscale

StartRead = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to copy a tensor to the host, and returns what waits for it: `ComputeQueue.start_read`."""

NonFiniteNorm = tuple[float, int, str]
"""A norm that is not finite, and a parameter whose gradient is not: its stage and its name, "" for none."""


_NO_GRADIENT = -1.0
"""The norm of a missing gradient in the table: it is no part of the global norm, as in torch."""
_EPSILON = 1e-6
"""Added to the norm that is divided by, as ``torch.nn.utils.clip_grads_with_norm_`` does."""


@frozen
class NormParameters:
    """The parameters of the global norm: every trained parameter once, a tied weight in its first stage.

    Args:
        parameters: (stage, name, dtype) of each, in the model's order.
    """

    parameters: tuple[tuple[int, str, torch.dtype], ...]

    @classmethod
    def of(
        cls, plan: Plan, parameters: Mapping[str, nn.Parameter], unused: Mapping[str, int] | None = None
    ) -> "NormParameters":
        """The parameters of a plan.

        Args:
            unused: the stage of each tensor that the example's step does not use.
        """
        first = dict(unused or {})
        for stage in plan.stages:
            for name in stage.parameters:
                first.setdefault(name, stage.index)
        found = ((first[n], n, p.dtype) for n, p in parameters.items() if p.requires_grad and n in first)
        return cls(tuple(found))

    def norms(self, states: Mapping[int, StageState], where: torch.device) -> list[Tensor]:
        """The norm of each gradient of these stages, on their device; 0 for parameters of other devices."""
        elsewhere, absent = (torch.full((), value, dtype=torch.float64, device=where) for value in (0.0, _NO_GRADIENT))
        updated = {stage: state.updated for stage, state in states.items()}
        held = [updated.get(stage, {}).get(name) for stage, name, _ in self.parameters]
        gradients = {i: p.grad for i, p in enumerate(held) if p is not None and p.grad is not None}
        norms = torch._foreach_norm([*gradients.values()]) if gradients else ()
        found = dict(zip(gradients, norms, strict=True))
        return [found.get(i, absent if stage in states else elsewhere) for i, (stage, *_) in enumerate(self.parameters)]

    def over_parts(
        self, norms: list[Tensor], found: Tensor, states: Mapping[int, StageState], replicas: Backend
    ) -> tuple[list[Tensor], Tensor]:
        """Norms of whole gradients from those of parts, and whether any replica has one that is not finite.

        Args:
            norms: of the slices of sharded stages and of split parameters here, and of the gradients of others; from
                `norms`, or empty.
            found: whether a gradient of this replica is not finite, a scalar.
            replicas: the device's transport to its replicas; all of them call this together.
        """
        mine = [
            i
            for i, (stage, name, _) in enumerate(self.parameters)
            if norms and stage in states and (states[stage].sharing or name in states[stage].split)
        ]
        own = [norms[i].double() for i in mine]
        has = [norm != _NO_GRADIENT for norm in own]
        copies = [states[stage].copies(name, replicas.devices) for stage, name, _ in (self.parameters[i] for i in mine)]
        squares = [
            torch.where(there, norm, 0.0) ** 2 / count for there, norm, count in zip(has, own, copies, strict=True)
        ]
        table = torch.stack([found.double(), *squares, *(there.double() for there in has)])
        replicas.all_reduce(table).wait()
        whole = torch.where(table[1 + len(mine) :] > 0, table[1 : 1 + len(mine)].sqrt(), _NO_GRADIENT)
        for i, norm in zip(mine, whole.unbind(), strict=True):
            norms[i] = norm
        return norms, table[0]

    def global_norm(self, norms: Tensor) -> Tensor:
        """The norm of all gradients together, as in ``torch.nn.utils.get_total_norm``, on the norms' device."""
        there = norms != _NO_GRADIENT
        # Selecting them needs their number on the host, which would wait for a GPU. Zeros do not change the sum, but
        # possibly the order of addition, so that the last bit may differ from that of one process.
        norms = norms[there] if norms.device.type == "cpu" else torch.where(there, norms, 0.0)
        dtypes = {dtype.to_real() for _, _, dtype in self.parameters} or {torch.float32}
        total: Tensor = torch.linalg.vector_norm(norms.to(reduce(torch.promote_types, dtypes)))
        return total


@define(eq=False)
class Update:
    """One device's part of the update.

    Args:
        clip_norm: the maximum of the global norm; None without clipping.
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
            if scale is None and self.needs_finite_norm:
                self._overflows = (~self.norm.isfinite()).double()

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
        if self._overflows is None:
            return False
        if self._overflow is None:
            overflows, *totals = torch.stack([self._overflows, *(total for total, _ in self._scales)]).tolist()
            scale = self._scale or 0.0
            for total, (_, members) in zip(totals, self._scales, strict=True):  # none without loss scaling
                if total != members * scale and not math.isnan(scale):
                    raise RequestError(
                        f"the loss is scaled by {scale:g} on this rank, and {members} ranks have the mean "
                        f"{total / members:g}: the scale must be equal on all; load the same state into the scaler of "
                        "every rank"
                    )
            self._overflow = overflows > 0
        return self._overflow

    def non_finite_norm(self, start_read: StartRead) -> LazyValue[NonFiniteNorm | None]:
        """The global norm of this update if it is not finite, with the parameter that the backward reached first of
        those whose gradients are not finite. None if the norm is finite or was not measured.
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
            clipping, held = torch.clamp(self.clip_norm / (self.norm + _EPSILON), max=1.0), state.gradients
            if held:
                torch._foreach_mul_(held, (clipping * self._factor(clipping.dtype)).to(held[0].device))
        if self._scale is not None and self._overflows is not None and state.handles_found_inf:
            state.step((self._overflows > 0).float())
        elif not self.overflow:
            state.step()
