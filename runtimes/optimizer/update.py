"""The update: what happens to gradients between a step's last backward and its optimizer steps.

    last backward ─▶ REDUCE_GRAD ──────▶ average ────────▶ REDUCE_TIED ─────▶ SYNC ───────────▶ STEP
                     sums over replicas   over all batches   of tied weights    unscale, norm      clip, step, or skip

SYNC is one exchange over the stages of a replica, of a table that is added up::

    │ devices that found a gradient that is not finite │ their loss scales │ norm of each gradient │ … │

Of the norms every device takes the global norm in the model's order, whatever the plan. After the reductions all
replicas have the same gradients, non-finite ones included, and come to the same.

All of it stays on the device, and the host runs ahead. Only whether to step at all is for the host to know, with a
scaler, and then as with torch's own: an optimizer that takes ``found_inf`` (a fused one) leaves the step out by itself.
"""

from collections.abc import Mapping
from enum import Enum
from functools import reduce

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.plan.plan import Plan
from .scaling import check_agreed, unscale
from .state import StageState

_NO_GRADIENT = -1.0
"""Stands for the norm of a gradient that there is not: it is no part of the global norm, as in torch."""
_EPSILON = 1e-6
"""Added to the norm that is divided by, as ``torch.nn.utils.clip_grads_with_norm_`` does."""


class Ending(Enum):
    """How a step ends: with an update, with gradients that are whole, or with gradients that wait for more batches."""

    STEP = "step"
    REDUCE = "reduce"
    KEEP = "keep"


@frozen
class Census:
    """Whose norms make the global norm: every trained parameter once, a tied weight where its first stage is.

    Args:
        parameters: (stage, name, dtype) of each, in the model's order.
    """

    parameters: tuple[tuple[int, str, torch.dtype], ...]

    @classmethod
    def of(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> "Census":
        """Take it.

        Args:
            plan: which stages read which parameters.
            parameters: the model's, in its order; they may be on meta.
        """
        first: dict[str, int] = {}
        for stage in plan.stages:
            for name in stage.parameters:
                first.setdefault(name, stage.index)
        found = ((first[n], n, p.dtype) for n, p in parameters.items() if p.requires_grad and n in first)
        return cls(tuple(found))

    def norms(self, states: Mapping[int, StageState], where: torch.device) -> list[Tensor]:
        """The norm of each gradient, on the device whose stages these are; 0 for those that are elsewhere."""
        elsewhere, absent = (torch.full((), value, dtype=torch.float64, device=where) for value in (0.0, _NO_GRADIENT))
        found, there, gradients = [elsewhere] * len(self.parameters), list[int](), list[Tensor]()
        for i, (stage, name, _) in enumerate(self.parameters):
            if stage in states:
                gradient = states[stage].parameters[name].grad
                found[i] = absent
                if gradient is not None:
                    there.append(i)
                    gradients.append(gradient)
        for i, norm in zip(there, torch._foreach_norm(gradients) if there else (), strict=True):
            found[i] = norm
        return found

    def global_norm(self, norms: Tensor) -> Tensor:
        """That of all gradients together, as ``torch.nn.utils.get_total_norm`` has it: where the norms are."""
        there = norms != _NO_GRADIENT
        # How many are chosen only the host could say, which would wait for a GPU. Zeros are none the longer, but may
        # have the others added up in another order, so that the last bit is not that of one process.
        norms = norms[there] if norms.device.type == "cpu" else torch.where(there, norms, 0.0)
        total: Tensor = torch.linalg.vector_norm(norms.to(self._dtype))
        return total

    @property
    def _dtype(self) -> torch.dtype:
        """What numbers of all gradients' dtypes are brought to."""
        dtypes = {dtype.to_real() for _, _, dtype in self.parameters} or {torch.float32}
        return reduce(torch.promote_types, dtypes)


@define(eq=False)
class Update:
    """One device's part of the update.

    Args:
        plan: whether stages wait for each other.
        states: of this device's stages, by index.
        census: whose norms are added up.
        clip_norm: the most that the global norm may be; None where nobody asks for it.
        where: the device's tensors are there.

    Attributes:
        norm: the global norm of the last update's gradients, before clipping; None where nobody asks for it.
    """

    plan: Plan
    states: Mapping[int, StageState]
    census: Census
    clip_norm: float | None
    where: torch.device
    norm: Tensor | None = field(default=None, init=False)
    _scale: float | None = field(default=None, init=False)
    _scales: list[tuple[Tensor, int]] = field(factory=list, init=False)
    _overflows: Tensor | None = field(default=None, init=False)
    _overflow: bool | None = field(default=None, init=False)
    _refused: bool = field(default=False, init=False)

    def begin(
        self, divisor: Tensor | float, scale: float | None, scales: tuple[Tensor, int] | None = None,
        refused: bool = False,
    ) -> None:  # fmt: skip
        """Take the average of the gradients.

        Args:
            divisor: what their sums are divided by.
            scale: what the losses were multiplied by, which SYNC takes back; None where they were not.
            scales: the sum of all replicas' scales, and how many replicas there are; None where there is one, or none
                is scaled.
            refused: whether no stage steps, whatever the gradients are.
        """
        self._refused = refused
        self.norm, self._scale, self._scales = None, scale, [] if scales is None else [scales]
        self._overflows, self._overflow = None, None
        if isinstance(divisor, Tensor) or divisor != 1:
            for state in self.states.values():
                state.divide_gradients(divisor)

    @property
    def looks_on(self) -> bool:
        """Whether this device has no stage, and no SYNC in its actions, while the others wait for each other."""
        return self.plan.sync and not self.states

    def sync(self, backend: Backend) -> None:
        """SYNC: what is known behind it is known of all stages."""
        scale, own = self._scale, [p for state in self.states.values() for p in state.parameters.values()]
        scaled = torch.full((), scale or 0.0, dtype=torch.float64, device=self.where)
        found = torch.zeros_like(scaled) if scale is None else unscale(own, scale, self.where)
        norms = [] if self.clip_norm is None else self.census.norms(self.states, self.where)
        table = torch.stack([found, scaled, *norms])
        backend.all_reduce(table).wait()
        if scale is not None:
            self._scales.append((table[1], backend.devices))
            self._overflows = table[0]
        self.norm = None if self.clip_norm is None else self.census.global_norm(table[2:])

    @property
    def overflow(self) -> bool:
        """Whether a gradient, of any stage, was not finite, so that no stage steps; never without a scale.

        The host waits for the device to know, once an update.

        Raises:
            RequestError: the loss was not scaled by the same number everywhere.
        """
        if self._scale is None or self._overflows is None:
            return False
        if self._overflow is None:
            overflows, *totals = torch.stack([self._overflows, *(total for total, _ in self._scales)]).tolist()
            for total, (_, members) in zip(totals, self._scales, strict=True):
                check_agreed(total, self._scale, members)
            self._overflow = overflows > 0
        return self._overflow

    def step(self, state: StageState) -> None:
        """STEP of a stage: clip its gradients, and step, unless gradients anywhere are not finite."""
        if self._refused:
            return
        if self.norm is not None and self.clip_norm is not None:
            state.multiply_gradients(torch.clamp(self.clip_norm / (self.norm + _EPSILON), max=1.0))
        if self._overflows is not None and state.leaves_out_itself:
            state.step((self._overflows > 0).float())
        elif not self.overflow:
            state.step()
