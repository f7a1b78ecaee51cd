"""Tied weights: every stage that reads one has a replica, and all replicas get the sum of the partial gradients.

The first of the stages adds the partial gradients up, in stage order, and hands the sum back.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..backends.contract import Backend, Handle
from ..core.plan import Plan


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
        here, placement = backend.device, self._placement
        sends: list[tuple[Handle, Sequence[Tensor]]] = []
        partials: dict[tuple[str, int], tuple[Tensor, Handle | None]] = {}
        totals: list[tuple[int, str, Tensor, Handle]] = []
        for weight in self._tied:
            owner = placement[weight.stages[0]]
            for stage in weight.stages:
                if placement[stage] == here:
                    partial = self._gradient(stage, weight.name)
                    if owner == here:
                        partials[weight.name, stage] = partial, None
                    else:
                        sends.append((backend.send([partial], owner), [partial]))
                elif owner == here:
                    buffer = torch.empty_like(self._replicas[weight.stages[0], weight.name])
                    partials[weight.name, stage] = buffer, backend.receive([buffer], placement[stage])
        for weight in self._tied:
            first, *others = weight.stages
            if placement[first] == here:
                total = self._sum([partials.pop((weight.name, stage)) for stage in weight.stages])
                self._replicas[first, weight.name].grad = total
                for stage in others:
                    if placement[stage] == here:
                        self._replicas[stage, weight.name].grad = total.clone()
                    else:
                        sends.append((backend.send([total], placement[stage]), [total]))
            else:
                for stage in others:
                    if placement[stage] == here:
                        buffer = torch.empty_like(self._replicas[stage, weight.name])
                        totals.append((stage, weight.name, buffer, backend.receive([buffer], placement[first])))
        for stage, name, buffer, handle in totals:
            handle.wait()
            self._replicas[stage, name].grad = buffer
        for handle, _ in sends:
            handle.wait()

    def _gradient(self, stage: int, name: str) -> Tensor:
        replica = self._replicas[stage, name]
        return torch.zeros_like(replica) if replica.grad is None else replica.grad

    @staticmethod
    def _sum(partials: list[tuple[Tensor, Handle | None]]) -> Tensor:
        for _, handle in partials:
            if handle is not None:
                handle.wait()
        total = partials[0][0]
        for partial, _ in partials[1:]:
            total = total + partial
        return total
