"""The interface between instructions and a stage: the messages that it exchanges with other stages, and its calls.

    LinkedStage       F and B: all that a stage of ``torch.compile`` has (``torch_compile/graph_run``)
    CapturedStage     also I, W, RECOMPUTE, OFFLOAD and RELOAD (`stage_run`)

The executor needs F and B; a plan with any of the others needs captured stages.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.actions import Kind
from ...core.capture.programs.stage import Boundary
from ...core.capture.programs.stage_programs import SavedStorage
from ..update.stage_state import StageState

Layout = dict[tuple[int, int], tuple[Boundary, ...]]
"""(sender, reader) → the tensors of their messages."""


class LinkedStage(ABC):
    """A stage with F and B, linked to the stages that it exchanges messages with.

    Args:
        boundary: the tensors that F reads from earlier stages, in order.
        outputs: the tensors that F returns for later stages, in order.
        results: names of the parts of the step's result that F returns, in order.
        batch: positions of the batch's leaves that it reads.

    Attributes:
        sources: for each tensor of the boundary its sending stage, and its position in that message.
        senders: stages that send to F.
        outgoing: reader → positions of its message's tensors among the outputs.
        tangents: position of an output → readers that send its gradient, and its position in their messages.
        receivers: stages that send to B.
        returned: stage that B sends to → positions of its message's tensors in the boundary.
        offloaded: the storages of the saved tensors that are offloaded between F and the backward.
        boundary, outputs, layout: as given.
    """

    offloaded: Sequence[SavedStorage] = ()

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
        self.boundary, self.outputs, self.layout = boundary, outputs, layout
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
        """Shape and dtype of every tensor in the message that this stage receives from stage ``peer``.

        Args:
            forward: whether it is the message that F reads; otherwise the one that B reads.
            peer: the sending stage.
        """
        return self._forward_messages[peer] if forward else self._backward_messages[peer]

    @abstractmethod
    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """F. Returns the outputs and the results."""

    @abstractmethod
    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """B. Returns the messages of gradients, one for each stage in ``returned``."""

    def held(self, microbatch: int) -> list[Any]:
        """The saved tensors of a microbatch, or the inputs kept to recompute them; empty if autograd holds them."""
        return []

    def warm_up(self, kinds: Collection[Kind], leaves: tuple[Any, ...], key: Tensor, seed: Tensor) -> None:
        """Run the programs of these kinds of actions once on zeros, and change nothing; nothing without programs."""
        return

    def free_shared(self) -> None:  # noqa: B027 - only captured stages have some
        """Free the tensors that all microbatches of a step read, after the last action of the step that reads them."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of these tensors in the last step."""
        return 0

    @property
    def persistent(self) -> set[int]:
        """Addresses of storages that are never freed during training, such as those of parameters."""
        return set()


class CapturedStage(LinkedStage):
    """A stage whose programs were captured: it also has I, W and RECOMPUTE. Arguments as of `LinkedStage`."""

    @abstractmethod
    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        """I. Returns the messages of gradients, one for each stage in ``returned``."""

    @abstractmethod
    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        """W. Adds the gradients of the parameters."""

    @abstractmethod
    def recompute(self, microbatch: int, leaves: tuple[Any, ...], key: Tensor) -> None:
        """RECOMPUTE. Computes the saved tensors from the inputs that F kept."""

    @abstractmethod
    def saved(self, microbatch: int) -> list[Any]:
        """The saved tensors of a microbatch; OFFLOAD and RELOAD replace them in this list."""
