"""B, I or W of a stage, bound to the tensors that are the same in every call, so that a call only passes the others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.capture.programs.stage import Boundary, StageInputs
from ...core.capture.programs.stage_programs import Backward
from ..update.gradient_sinks import GradientSink

_KEY = -1
"""Marks the random key among positions in the batch."""


def _none() -> list[Tensor]:
    return []


class BoundBackward:
    """B, I or W of one stage.

    Args:
        static: parameters, buffers and constants, in the order of ``inputs``.
        loss: position of the loss among the stage's outputs; None if another stage computes it.
        sinks: creates the sink of gradients of parameters, from these and whether SCATTER_GRAD directly follows.
        returned: for each message of gradients, positions of its tensors among the boundary inputs.
        scattered: whether SCATTER_GRAD directly follows the program, if replicas share gradients.

    Attributes:
        saved: positions of the saved tensors that it reads.
        parameters: whose gradients it computes, by number.
        sink_apart: gets the gradients in a run that SCATTER_GRAD does not directly follow.
    """

    def __init__(
        self,
        program: Backward,
        inputs: StageInputs,
        static: list[Any],
        loss: int | None,
        sinks: Callable[[Sequence[nn.Parameter], bool], GradientSink],
        returned: Sequence[Sequence[int]],
        device: torch.device,
        shared: Callable[[], list[Tensor]] = _none,
        scattered: bool = True,
    ) -> None:
        boundary_count = len(inputs.boundary)
        self.saved = program.saved
        self._gradients = len(program.gradients)
        self._boundary, self._device = inputs.boundary, device
        order = {place: i for i, place in enumerate(program.gradients)}
        self._messages = [[(order.get(place), place) for place in places] for places in returned]
        self.parameters: list[nn.Parameter] = [static[i - boundary_count] for i in program.parameters]
        self._sink, self.sink_apart = sinks(self.parameters, scattered), sinks(self.parameters, False)
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

    def run(
        self,
        saved: list[Any],
        created: list[Any],
        tangents: dict[int, Tensor],
        seed: Tensor,
        leaves: tuple[Any, ...],
        key: Tensor,
        release: bool = True,
        sink: GradientSink | None = None,
    ) -> tuple[list[list[Tensor]], list[Any]]:
        """Run the program, and add the gradients of parameters to their ``grad``.

        Args:
            tangents: position of an output → its gradient.
            release: whether to empty ``saved`` and ``created``, so that each tensor is freed after its last use.
            sink: gets the gradients of parameters; None for that of the stage.

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
        sink = sink or self._sink
        sink.begin()
        values = self._run(given, sink)
        boundary, device = self._boundary, self._device
        messages = [
            [zeros(boundary[place], device) if i is None else values[i].contiguous() for i, place in message]
            for message in self._messages
        ]
        return messages, values[self._gradients :]

    def discarded(self) -> GradientSink:
        """A sink that keeps nothing."""
        return GradientSink.discarding(self.parameters)


def zeros(boundary: Boundary, device: torch.device) -> Tensor:
    """The gradient of a tensor that the loss does not depend on."""
    return torch.zeros(boundary.shape, dtype=boundary.dtype, device=device)
