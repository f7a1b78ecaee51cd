"""A backward program bound to the tensors of its stage that never change, so that a call only fills in the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.capture.programs.programs import Backward
from ...core.capture.programs.stage import Boundary, StageInputs
from ...core.capture.regions.regions import nothing_flowed

_KEY = -1
"""Stands for the random key where a position in the batch may stand."""


class BoundBackward:
    """B, I or W of one stage.

    Args:
        program: the program.
        inputs: what the stage reads.
        static: parameters, buffers and constants, in the order of ``inputs``.
        loss: position of the loss among the stage's outputs, or None where it is not computed there.
        buffer: gives the memory for a parameter's gradient.
        returned: for each message of gradients, positions of its tensors among the boundary inputs.
        device: where its tensors are.

    Attributes:
        saved: positions of the saved tensors that it reads.
    """

    def __init__(
        self,
        program: Backward,
        inputs: StageInputs,
        static: list[Any],
        loss: int | None,
        buffer: Callable[[nn.Parameter], Tensor],
        returned: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        kept = len(inputs.boundary)
        self.saved = program.saved
        self._gradients = len(program.gradients)
        self._boundary, self._device = inputs.boundary, device
        order = {place: i for i, place in enumerate(program.gradients)}
        self._messages = [[(order.get(place), place) for place in places] for places in returned]
        self._parameters: list[nn.Parameter] = [static[i - kept] for i in program.parameters]
        self._buffers = [buffer(parameter) for parameter in self._parameters]
        self._run = program.run
        self._created = program.created
        self._loss = loss
        self._tangents = program.tangents
        self._fixed: list[Any] = []
        self._fill: list[tuple[int, int]] = []
        before = len(program.saved) + len(program.created)
        for i in program.inputs:
            place = i - kept
            if place < len(static):
                self._fixed.append(static[place])
            else:
                leaf = place - len(static)
                number = inputs.batch[leaf] if leaf < len(inputs.batch) else _KEY
                self._fill.append((before + len(self._fixed), number))
                self._fixed.append(None)

    def run(
        self,
        saved: list[Any],
        created: list[Any],
        tangents: dict[int, Tensor],
        seed: Tensor,
        leaves: tuple[Any, ...],
        key: Tensor,
        release: bool = True,
    ) -> tuple[list[list[Tensor]], list[Any]]:
        """Run the program, and add the gradients of parameters to those that they have.

        Args:
            saved: F's saved tensors.
            created: what I created; empty for B and I.
            tangents: position of an output → its gradient.
            seed: the gradient of the loss.
            leaves: the microbatch's.
            key: its random key.
            release: empty ``saved`` and ``created``, so that each tensor goes with its last use.

        Returns:
            The messages of gradients, contiguous, with zeros where nothing flows back; and what I creates for W.
        """
        given = [saved[i] for i in self.saved]
        if self._created:
            given += [created[i] for i in self._created]
        given += self._fixed
        for place, leaf in self._fill:
            given[place] = key if leaf == _KEY else leaves[leaf]
        loss = self._loss
        for output in self._tangents:
            given.append(seed if output == loss else tangents[output])
        if release:
            saved.clear()
            created.clear()
        values = self._run(given, self)
        boundary, device = self._boundary, self._device
        messages = [
            [zeros(boundary[place], device) if i is None else values[i].contiguous() for i, place in message]
            for message in self._messages
        ]
        return messages, values[self._gradients :]

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        if nothing_flowed(gradient):
            return
        parameter = self._parameters[number]
        held = parameter.grad
        if held is not None:
            held.add_(gradient)
        else:
            parameter.grad = self._buffers[number].copy_(gradient)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product of two matrices to the gradient of a parameter, inside the product."""
        parameter = self._parameters[number]
        held = parameter.grad
        if held is not None:
            held.addmm_(left, right)
        else:
            parameter.grad = torch.mm(left, right, out=self._buffers[number])


def zeros(boundary: Boundary, device: torch.device) -> Tensor:
    """The gradient of a tensor that nothing flows back to."""
    return torch.zeros(boundary.shape, dtype=boundary.dtype, device=device)
