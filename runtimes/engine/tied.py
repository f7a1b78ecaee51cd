"""Tied weights: every stage that reads one has a replica, and all replicas get the sum of the partial gradients.

The first of the stages adds the partial gradients up, in stage order, and hands the sum back.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...backends.contract import Backend, Handle
from ...core.plan.plan import Plan, TiedWeight


class TiedReduction:
    """Reduces the gradients of the tied weights that one device has replicas of.

    Args:
        plan: the plan.
        replicas: (stage, parameter name) → this device's replica.
    """

    def __init__(self, plan: Plan, replicas: Mapping[tuple[int, str], nn.Parameter]) -> None:
        self._tied = plan.tied
        self._placement = plan.placement
        self._replicas = replicas

    def reduce(self, backend: Backend) -> None:
        """Exchange gradients; returns when this device's replicas hold the sums.

        Every device sends its partial gradients before it waits for any, so the exchange cannot lock up.
        """
        here, sends = backend.device, _Sends(backend)
        tied = [weight for weight in self._tied if not self._frozen(weight)]
        partials = {weight.name: self._exchange_partials(weight, backend, sends) for weight in tied}
        totals: list[tuple[nn.Parameter, Tensor, Handle]] = []
        for weight in tied:
            first, *others = weight.stages
            mine = [stage for stage in others if self._placement[stage] == here]
            if self._placement[first] == here:
                total = _sum(partials[weight.name])
                self._replicas[first, weight.name].grad = total
                for stage in mine:
                    self._replicas[stage, weight.name].grad = total.clone()
                for stage in others:
                    if stage not in mine:
                        sends.add(total, self._placement[stage])
            else:
                for stage in mine:
                    replica = self._replicas[stage, weight.name]
                    buffer = torch.empty_like(replica, memory_format=torch.contiguous_format)
                    totals.append((replica, buffer, backend.receive([buffer], self._placement[first])))
        for replica, buffer, handle in totals:
            handle.wait()
            replica.grad = buffer
        sends.wait()

    def _frozen(self, weight: TiedWeight) -> bool:
        """Whether it is frozen now: all devices with a replica see the same."""
        held = (self._replicas.get((stage, weight.name)) for stage in weight.stages)
        return any(replica is not None and not replica.requires_grad for replica in held)

    def _exchange_partials(
        self, weight: TiedWeight, backend: Backend, sends: "_Sends"
    ) -> list[tuple[Tensor, Handle | None]]:
        """Send this device's partial gradients to where they are added up; there, return all of them in stage order."""
        here, owner_stage = backend.device, weight.stages[0]
        owner = self._placement[owner_stage]
        found: list[tuple[Tensor, Handle | None]] = []
        for stage in weight.stages:
            device = self._placement[stage]
            if device == here and owner == here:
                found.append((self._gradient(stage, weight.name), None))
            elif device == here:
                sends.add(self._gradient(stage, weight.name), owner)
            elif owner == here:
                first = self._replicas[owner_stage, weight.name]
                buffer = torch.empty_like(first, memory_format=torch.contiguous_format)
                found.append((buffer, backend.receive([buffer], device)))
        return found

    def _gradient(self, stage: int, name: str) -> Tensor:
        replica = self._replicas[stage, name]
        return torch.zeros_like(replica) if replica.grad is None else replica.grad


class _Sends:
    """Messages on their way, kept until they have arrived."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._flying: list[tuple[Handle, Tensor]] = []

    def add(self, tensor: Tensor, device: int) -> None:
        self._flying.append((self._backend.send([tensor], device), tensor))

    def wait(self) -> None:
        for handle, _ in self._flying:
            handle.wait()


def _sum(partials: list[tuple[Tensor, Handle | None]]) -> Tensor:
    for _, handle in partials:
        if handle is not None:
            handle.wait()
    total = partials[0][0]
    for partial, _ in partials[1:]:
        total = total + partial
    return total
