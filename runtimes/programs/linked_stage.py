"""A stage as instructions see it: what it reads of other stages and sends them, and the calls of F and B.

`StageRun` runs a captured stage's programs; a stage of a graph that autograd runs is in ``torch_compile/running``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.capture.programs.stage import Boundary
from ..optimizer.state import StageState

Layout = dict[tuple[int, int], tuple[Boundary, ...]]
"""(sender, reader) → the tensors of their messages."""


class LinkedStage(ABC):
    """One stage, linked to the others.

    Args:
        index: the stage.
        boundary: what F reads of earlier stages, in order.
        outputs: what F gives to later stages, in order.
        results: names of what else F gives, in order.
        layout: the tensors of every message between stages.
        state: parameters and buffers.
        batch: positions of the batch's leaves that it reads.

    Attributes:
        sources: for each tensor of the boundary its sender, and its position in that message.
        senders: stages that send to F.
        outgoing: reader → positions of its message's tensors among the outputs.
        tangents: position of an output → readers that send its gradient, and its position in their messages.
        receivers: stages that send to B.
        returned: stage that B sends to → positions of its message's tensors in the boundary.
    """

    def __init__(
        self,
        index: int,
        boundary: Sequence[Boundary],
        outputs: Sequence[Boundary],
        results: Sequence[str],
        layout: Layout,
        state: StageState,
        batch: Sequence[int],
    ) -> None:
        self.index, self.results, self.state, self.batch = index, results, state, batch
        incoming = {src: tensors for (src, dst), tensors in layout.items() if dst == index}
        outgoing = {dst: tensors for (src, dst), tensors in layout.items() if src == index}
        self.sources = [
            next(
                (src, [b.name for b in tensors].index(wanted.name))
                for src, tensors in incoming.items()
                if wanted in tensors
            )
            for wanted in boundary
        ]
        self.senders = tuple(dict.fromkeys(src for src, _ in self.sources))
        position = {output.name: i for i, output in enumerate(outputs)}
        self.outgoing = {dst: [position[b.name] for b in tensors] for dst, tensors in outgoing.items()}
        # Gradients of an output are summed from its last reader to its first, as autograd does in one process.
        self.tangents = {
            position[b.name]: [
                (dst, [g.name for g in outgoing[dst] if g.differentiable].index(b.name))
                for dst in sorted(outgoing, reverse=True)
                if b in outgoing[dst]
            ]
            for b in outputs
            if b.differentiable
        }
        self.receivers = tuple(dict.fromkeys(dst for sources in self.tangents.values() for dst, _ in sources))
        place = {tensor.name: i for i, tensor in enumerate(boundary)}
        self.returned = {
            src: [place[b.name] for b in tensors if b.differentiable]
            for src, tensors in incoming.items()
            if any(b.differentiable for b in tensors)
        }
        self._forward_messages = {src: [(b.shape, b.dtype) for b in tensors] for src, tensors in incoming.items()}
        self._backward_messages = {
            dst: [(b.shape, b.dtype) for b in tensors if b.differentiable] for dst, tensors in outgoing.items()
        }

    def message(self, forward: bool, peer: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the message that this stage gets from stage ``peer``."""
        return self._forward_messages[peer] if forward else self._backward_messages[peer]

    @abstractmethod
    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """F. Returns the outputs, and the results."""

    @abstractmethod
    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """B. Returns the messages of gradients, one for each stage in ``returned``."""

    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """I."""
        raise NotImplementedError(f"stage {self.index} has no I: its plan has B")

    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        """W."""
        raise NotImplementedError(f"stage {self.index} has no W: its plan has B")

    def recompute(self, microbatch: int, leaves: tuple[Any, ...], key: Tensor) -> None:
        """RECOMPUTE: make the saved tensors again."""
        raise NotImplementedError(f"stage {self.index} recomputes nothing: its plan has no RECOMPUTE")

    def held(self, microbatch: int) -> list[Any]:
        """The saved tensors of a microbatch, or what is kept to make them."""
        return []

    @property
    def persistent(self) -> set[int]:
        """Storages that live for the whole of training."""
        return set()
