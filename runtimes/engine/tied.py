"""Tied weights: every stage that reads one has a copy of it, and all copies get the sum of their gradients.

The first of these stages sums the gradients in stage order, and sends the sum to the others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...backends.contract import Backend, Handle
from ...core.plan.plan import Plan, TiedWeight
from ..update.stage_state import StageState

Sent = tuple[Handle, Tensor]
"""A transfer, and the tensor that is kept until it has ended."""


class TiedReduction:
    """Reduces the gradients of the tied weights that one device has copies of.

    Args:
        states: of this device's stages. A sharded stage exchanges only this replica's slice of the gradient.
    """

    def __init__(self, plan: Plan, states: Mapping[int, StageState]) -> None:
        self._tied = plan.tied
        self._placement = plan.placement
        self._states = states

    def reduce(self, backend: Backend) -> None:
        """Exchange gradients; returns when the gradients of this device's copies are the sums.

        Every device sends its gradients before it waits for any, so the exchange cannot deadlock.
        """
        here, sends = backend.device, list[Sent]()
        self._copies = {
            (stage, weight.name): self._states[stage].updated[weight.name]
            for weight in self._tied
            for stage in weight.stages
            if stage in self._states and weight.name in self._states[stage].updated
        }
        tied = [weight for weight in self._tied if not self._frozen(weight) and not self._elsewhere(weight)]
        partials = {weight.name: self._exchange_partials(weight, backend, sends) for weight in tied}
        totals: list[tuple[nn.Parameter, Tensor, Handle]] = []
        for weight in tied:
            first, *others = weight.stages
            mine = [stage for stage in others if self._placement[stage] == here]
            if self._placement[first] == here:
                total = _sum(partials[weight.name])
                self._copies[first, weight.name].grad = total
                for stage in mine:
                    self._copies[stage, weight.name].grad = total.clone()
                for stage in others:
                    if stage not in mine:
                        sends.append((backend.send([total], self._placement[stage]), total))
            else:
                for stage in mine:
                    copy = self._copies[stage, weight.name]
                    buffer = torch.empty_like(copy, memory_format=torch.contiguous_format)
                    totals.append((copy, buffer, backend.receive([buffer], self._placement[first])))
        for copy, buffer, handle in totals:
            handle.wait()
            copy.grad = buffer
        for handle, _ in sends:
            handle.wait()

    def _frozen(self, weight: TiedWeight) -> bool:
        """Whether it is frozen now; all devices with a copy see the same value."""
        held = [self._states[stage].parameters[weight.name] for stage in weight.stages if stage in self._states]
        return any(not copy.requires_grad for copy in held)

    def _elsewhere(self, weight: TiedWeight) -> bool:
        """Whether all of its slices belong to other replicas; every device of this replica gets the same answer."""
        return any((stage, weight.name) not in self._copies for stage in weight.stages if stage in self._states)

    def _exchange_partials(
        self, weight: TiedWeight, backend: Backend, sends: list[Sent]
    ) -> list[tuple[Tensor, Handle | None]]:
        """Send this device's gradients to the device of the first stage; there, return all of them in stage order."""
        here, owner_stage = backend.device, weight.stages[0]
        owner = self._placement[owner_stage]
        found: list[tuple[Tensor, Handle | None]] = []
        for stage in weight.stages:
            device = self._placement[stage]
            if device == here and owner == here:
                found.append((self._gradient(stage, weight.name), None))
            elif device == here:
                gradient = self._gradient(stage, weight.name)
                sends.append((backend.send([gradient], owner), gradient))
            elif owner == here:
                first = self._copies[owner_stage, weight.name]
                buffer = torch.empty_like(first, memory_format=torch.contiguous_format)
                found.append((buffer, backend.receive([buffer], device)))
        return found

    def _gradient(self, stage: int, name: str) -> Tensor:
        copy = self._copies[stage, name]
        return torch.zeros_like(copy) if copy.grad is None else copy.grad


def _sum(partials: list[tuple[Tensor, Handle | None]]) -> Tensor:
    for _, handle in partials:
        if handle is not None:
            handle.wait()
    total = partials[0][0]
    for partial, _ in partials[1:]:
        total = total + partial
    return total
