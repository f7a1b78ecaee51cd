"""B, I or W of a stage, bound to the tensors that are the same in every call, so that a call only passes the others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.capture.programs.accumulated_products import accumulate_product, first_product
from ...core.capture.programs.generated_code import Sink
from ...core.capture.programs.stage import Boundary, StageInputs
from ...core.capture.programs.stage_programs import Backward
from ...core.capture.regions.regions import is_no_gradient
from ..optimizer.sharing.gradient_scatter import GradientScatter

_KEY = -1
"""Marks the random key among positions in the batch."""


def _none() -> list[Tensor]:
    return []


class BoundBackward:
    """B, I or W of one stage.

    Args:
        program: the program.
        inputs: the inputs of the stage.
        static: parameters, buffers and constants, in the order of ``inputs``.
        loss: position of the loss among the stage's outputs; None if another stage computes it.
        buffer: parameter → the memory of its gradient.
        returned: for each message of gradients, positions of its tensors among the boundary inputs.
        device: the torch device of its tensors.
        shared: returns the stage's shared tensors, in a step.
        scatter: gets the gradients of parameters, if replicas share them; None if ``grad`` does.
        scattered: whether SCATTER_GRAD directly follows the program.

    Attributes:
        saved: positions of the saved tensors that it reads.
        sink_apart: gets the gradients in a run that SCATTER_GRAD does not directly follow; None if ``grad`` does.
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
        shared: Callable[[], list[Tensor]] = _none,
        scatter: GradientScatter | None = None,
        scattered: bool = True,
    ) -> None:
        boundary_count = len(inputs.boundary)
        self.saved = program.saved
        self._gradients = len(program.gradients)
        self._boundary, self._device = inputs.boundary, device
        order = {place: i for i, place in enumerate(program.gradients)}
        self._messages = [[(order.get(place), place) for place in places] for places in returned]
        self._parameters: list[nn.Parameter] = [static[i - boundary_count] for i in program.parameters]
        self.sink_apart = None if scatter is None else scatter.sink(self._parameters, scattered=False)
        self._scattering = None if scatter is None else scatter.sink(self._parameters, scattered)
        self._buffers = [buffer(parameter) for parameter in self._parameters] if scatter is None else []
        self._run = program.run
        self._created = program.created
        self._loss = loss
        self._tangents = program.tangents
        self._fixed: list[Any] = []
        self._fill: list[tuple[int, int]] = []
        self._shared, self._fill_shared = shared, list[tuple[int, int]]()
        before = len(program.saved) + len(program.created)
        end = len(static) + len(inputs.batch) + inputs.random
        for i in program.inputs:
            place = i - boundary_count
            if place < len(static):
                self._fixed.append(static[place])
            elif place >= end:
                self._fill_shared.append((before + len(self._fixed), place - end))
                self._fixed.append(None)
            else:
                leaf = place - len(static)
                number = inputs.batch[leaf] if leaf < len(inputs.batch) else _KEY
                self._fill.append((before + len(self._fixed), number))
                self._fixed.append(None)

    @property
    def reads_seed(self) -> bool:
        """Whether it reads the gradient of the loss."""
        return self._loss is not None and self._loss in self._tangents

    @property
    def gradient_memory(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters whose ``grad`` it adds to, with the memory of these; empty if replicas share gradients."""
        return list(zip(self._parameters, self._buffers, strict=False))

    def run(
        self,
        saved: list[Any],
        created: list[Any],
        tangents: dict[int, Tensor],
        seed: Tensor,
        leaves: tuple[Any, ...],
        key: Tensor,
        release: bool = True,
        sink: Sink | None = None,
    ) -> tuple[list[list[Tensor]], list[Any]]:
        """Run the program, and add the gradients of parameters to their ``grad``.

        Args:
            saved: F's saved tensors.
            created: what I created; empty for B and I.
            tangents: position of an output → its gradient.
            seed: the gradient of the loss.
            leaves: of the microbatch.
            key: its random key.
            release: whether to empty ``saved`` and ``created``, so that each tensor is freed after its last use.
            sink: gets the gradients of parameters; None for their ``grad``, or what replicas share.

        Returns:
            The messages of gradients, contiguous, with zeros for tensors without a gradient; and what I creates for W.
        """
        given = [saved[i] for i in self.saved]
        if self._created:
            given += [created[i] for i in self._created]
        given += self._fixed
        for place, leaf in self._fill:
            given[place] = key if leaf == _KEY else leaves[leaf]
        if self._fill_shared:
            shared = self._shared()
            for place, number in self._fill_shared:
                given[place] = shared[number]
        loss = self._loss
        for output in self._tangents:
            given.append(seed if output == loss else tangents[output])
        if release:
            saved.clear()
            created.clear()
        if sink is None and self._scattering is not None:
            self._scattering.begin()
            sink = self._scattering
        values = self._run(given, self if sink is None else sink)
        boundary, device = self._boundary, self._device
        messages = [
            [zeros(boundary[place], device) if i is None else values[i].contiguous() for i, place in message]
            for message in self._messages
        ]
        return messages, values[self._gradients :]

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        if is_no_gradient(gradient):
            return
        parameter = self._parameters[number]
        held = parameter.grad
        if held is not None:
            held.add_(gradient)
        else:
            parameter.grad = self._buffers[number].copy_(gradient)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product of two matrices to the gradient of a parameter, in one operator."""
        parameter = self._parameters[number]
        held = parameter.grad
        if held is not None:
            accumulate_product(held, left, right)
        else:
            parameter.grad = first_product(self._buffers[number], left, right)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        """The gradients of parameters, to be added to; zeros for the first ones of a step."""
        found = []
        for number in numbers:
            parameter = self._parameters[number]
            held = parameter.grad
            if held is None:
                held = parameter.grad = self._buffers[number].zero_()
            found.append(held)
        return found

    def added(self, numbers: Sequence[int]) -> None:
        """They have been added to."""

    def discarded(self) -> "DiscardedGradients":
        """A sink that keeps nothing."""
        return DiscardedGradients(self._parameters)


class DiscardedGradients:
    """A sink that runs the operators of `BoundBackward` on gradients of parameters, and keeps nothing.

    Args:
        parameters: by number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def add(self, number: int, gradient: Tensor) -> None:
        """Copy and add a gradient."""
        if not is_no_gradient(gradient):
            gradient.clone().add_(gradient)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Multiply two matrices, and add their product."""
        torch.mm(left, right).addmm_(left, right)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        """Zeros like the gradients of parameters."""
        parameters = [self._parameters[number] for number in numbers]
        return [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in parameters]

    def added(self, numbers: Sequence[int]) -> None:
        """They are discarded."""


def zeros(boundary: Boundary, device: torch.device) -> Tensor:
    """The gradient of a tensor that the loss does not depend on."""
    return torch.zeros(boundary.shape, dtype=boundary.dtype, device=device)
