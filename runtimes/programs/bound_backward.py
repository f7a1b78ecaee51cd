"""B, I or W of a stage: which tensors it reads, the sinks of its gradients, and the messages that it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.capture.programs.stage import Boundary, StageInputs
from ...core.capture.programs.stage_programs import Backward
from ..update.buckets import GradientSink


class BoundBackward:
    """B, I or W of one stage.

    Args:
        static: parameters, buffers and constants, in the order of ``inputs``; the program reads some of them, and of
            what follows them among the inputs of F.
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
        self._reads = [i - boundary_count for i in program.inputs]

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
        inputs: Sequence[Any],
        release: bool = True,
        sink: GradientSink | None = None,
    ) -> tuple[list[list[Tensor]], list[Any]]:
        """Run the program, and add the gradients of parameters to their ``grad``.

        Args:
            tangents: position of an output → its gradient.
            inputs: of F, without the tensors from other stages.
            release: whether to empty ``saved`` and ``created``, so that each tensor is freed after its last use.
            sink: gets the gradients of parameters; None for that of the stage.

        Returns:
            The messages of gradients, contiguous, with zeros for tensors without a gradient; and what I creates for W.
        """
        given = [*(saved[i] for i in self.saved), *(created[i] for i in self._created)]
        given += [inputs[i] for i in self._reads]
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
