"""Gradient clipping (``clip_norm=``): the global norm of all gradients, and the factor that limits it.

Every device computes the global norm from the norms in the model's order, under any plan: SYNC brings it the norms of
the other stages (`update`). Of sharded stages each replica has slices (`shards`): their norms are added over the
replicas first.
"""

from collections.abc import Mapping
from functools import reduce

import torch
from attrs import frozen
from torch import Tensor, nn

from ...backends.contract import Backend
from ...core.plan.plan import Plan
from .stage_state import StageState

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
            plan: has the parameters of each stage.
            parameters: the model's, in its order; they may be on meta.
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
        found, there, gradients = [elsewhere] * len(self.parameters), list[int](), list[Tensor]()
        for i, (stage, name, _) in enumerate(self.parameters):
            if stage in states:
                held = states[stage].updated.get(name)
                gradient = None if held is None else held.grad
                found[i] = absent
                if gradient is not None:
                    there.append(i)
                    gradients.append(gradient)
        for i, norm in zip(there, torch._foreach_norm(gradients) if there else (), strict=True):
            found[i] = norm
        return found

    def over_parts(
        self, norms: list[Tensor], found: Tensor, states: Mapping[int, StageState], replicas: Backend
    ) -> tuple[list[Tensor], Tensor]:
        """Norms of whole gradients from those of parts, and whether any replica has one that is not finite.

        Args:
            norms: of the slices of sharded stages and of split parameters here, and of the gradients of others; from
                `norms`, or empty.
            found: whether a gradient of this replica is not finite, a scalar.
            states: of this device's stages.
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
        total: Tensor = torch.linalg.vector_norm(norms.to(self._dtype))
        return total

    @property
    def _dtype(self) -> torch.dtype:
        """The common dtype of all gradients."""
        dtypes = {dtype.to_real() for _, _, dtype in self.parameters} or {torch.float32}
        return reduce(torch.promote_types, dtypes)


def clipping_factor(norm: Tensor, most: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most this, as in ``clip_grads_with_norm_`` of torch.

    Args:
        norm: the global norm, a scalar.
        most: the limit.

    Returns:
        A scalar on the device of ``norm``, at most 1.
    """
    return torch.clamp(most / (norm + _EPSILON), max=1.0)
