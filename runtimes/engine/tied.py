"""Tied weights: every stage that reads one has a copy of it, and all copies get the sum of their gradients.

The devices with a copy send each other their gradients, and each adds all of them in the order of the stages.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...backends.contract import Backend, Handle
from ...core.plan.plan import Plan, TiedWeight
from ..update.stage_state import StageState


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
        here, sends, receives = backend.device, list[Handle](), list[Handle]()
        found: list[tuple[TiedWeight, list[Tensor]]] = []
        for weight in self._tied:
            own = {stage: self._states[stage] for stage in weight.stages if self._placement[stage] == here}
            if not own or not all(_exchanged(state, weight.name) for state in own.values()):
                continue
            copies = {stage: state.updated[weight.name] for stage, state in own.items()}
            gradients = {s: torch.zeros_like(copy) if copy.grad is None else copy.grad for s, copy in copies.items()}
            others = dict.fromkeys(self._placement[stage] for stage in weight.stages if stage not in own)
            sends += [backend.send([*gradients.values()], other) for other in others]
            like = next(iter(copies.values()))
            for other in others:
                stages = [stage for stage in weight.stages if self._placement[stage] == other]
                buffers = [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in stages]
                receives.append(backend.receive(buffers, other))
                gradients |= dict(zip(stages, buffers, strict=True))
            found.append((weight, [gradients[stage] for stage in weight.stages]))
        for handle in (*receives, *sends):  # a transport may post a receive when it is waited for
            handle.wait()
        for weight, parts in found:
            total = sum(parts[1:], parts[0])
            mine = [self._states[stage] for stage in weight.stages if self._placement[stage] == here]
            for number, state in enumerate(mine):
                state.updated[weight.name].grad = total.clone() if number else total


def _exchanged(state: StageState, name: str) -> bool:
    """Whether the gradients of a tied weight are exchanged, by the same answer on all devices of a replica with a copy.

    It may be frozen now, or all of its slices may belong to other replicas.
    """
    return state.parameters[name].requires_grad and name in state.updated
