"""The update: what happens to gradients between a step's last backward and its optimizer steps.

    last backward ─▶ REDUCE_GRAD ──────▶ average ────────▶ REDUCE_TIED ─────▶ SYNC ───────────▶ STEP
                     sums over replicas   over all batches   of tied weights    unscale, norm      clip, step, or skip

SYNC is one exchange over the stages of a replica, of a table that is added up::

    │ devices that found a gradient that is not finite │ their loss scales │ norm of each gradient │ … │

Of the norms every device takes the global norm in the model's order, whatever the plan. After the reductions all
replicas have the same gradients, non-finite ones included, and come to the same.
"""

from collections.abc import Mapping
from enum import Enum

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from ..backends.contract import Backend
from ..core.plan import Plan
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

    def norms(self, states: Mapping[int, StageState]) -> list[float]:
        """The norm of each gradient, where the stages of one device are; 0 for those that are elsewhere."""
        own = [(i, states[stage].parameters[name].grad) for i, (stage, name, _) in enumerate(self.parameters)
               if stage in states]  # fmt: skip
        there = [(i, gradient) for i, gradient in own if gradient is not None]
        norms = torch._foreach_norm([gradient for _, gradient in there]) if there else ()
        found = [0.0] * len(self.parameters)
        for i, _ in own:
            found[i] = _NO_GRADIENT
        for (i, _), norm in zip(there, torch.stack(norms).tolist() if there else (), strict=True):
            found[i] = norm
        return found

    def global_norm(self, norms: list[float]) -> Tensor:
        """That of all gradients together, as ``torch.nn.utils.get_total_norm`` has it: on the host."""
        found = [
            torch.tensor(norm, dtype=dtype)
            for norm, (_, _, dtype) in zip(norms, self.parameters, strict=True)
            if norm != _NO_GRADIENT
        ]
        return torch.linalg.vector_norm(torch.stack(found)) if found else torch.tensor(0.0)


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
        overflow: whether one of them, of any stage, was not finite, so that no stage steps; never without a scale.
    """

    plan: Plan
    states: Mapping[int, StageState]
    census: Census
    clip_norm: float | None
    where: torch.device
    norm: Tensor | None = field(default=None, init=False)
    overflow: bool = field(default=False, init=False)
    _scale: float | None = field(default=None, init=False)

    def begin(self, divisor: Tensor | float, scale: float | None) -> None:
        """Take the average of the gradients.

        Args:
            divisor: what their sums are divided by.
            scale: what the losses were multiplied by, which SYNC takes back; None where they were not.
        """
        self.norm, self.overflow, self._scale = None, False, scale
        if isinstance(divisor, Tensor) or divisor != 1:
            for state in self.states.values():
                state.divide_gradients(divisor)

    @property
    def looks_on(self) -> bool:
        """Whether this device has no stage, and no SYNC in its actions, while the others wait for each other."""
        return self.plan.sync and not self.states

    def sync(self, backend: Backend) -> None:
        """SYNC. Returns when all stages have told.

        Raises:
            RequestError: they scaled the loss by different numbers.
        """
        scale, own = self._scale, [p for state in self.states.values() for p in state.parameters.values()]
        overflow = scale is not None and unscale(own, scale, self.where)
        norms = [] if self.clip_norm is None else self.census.norms(self.states)
        table = torch.tensor([overflow, scale or 0.0, *norms], dtype=torch.float64, device=self.where)
        backend.all_reduce(table).wait()
        overflows, scales, *norms = table.tolist()
        if scale is not None:
            check_agreed(scales, scale, backend.devices)
        self.overflow = overflows > 0
        self.norm = None if self.clip_norm is None else self.census.global_norm(norms)

    def step(self, state: StageState) -> None:
        """STEP of a stage: clip its gradients, and step, unless gradients anywhere are not finite."""
        if self.norm is not None and self.clip_norm is not None:
            state.multiply_gradients(torch.clamp(self.clip_norm / (self.norm + _EPSILON), max=1.0))
        if not self.overflow:
            state.step()
