"""A stage without graphs on a device whose other stages have some: it runs its programs in every step.

While the others are captured it runs nothing. Then it returns tensors like those of a step, and keeps what it is given
until the capture ends: in a step it may read an input at any later time, and no graph may reuse that memory.
"""

from typing import Any

import torch
from torch import Tensor

from ....core.capture.programs.stage import Boundary
from ..stage_run import StageRun
from .wrapped_stage import WrappedStage


class UngraphedStage(WrappedStage):
    """A stage that runs its programs.

    Args:
        run: the stage.

    Attributes:
        kept: what it is given while the other stages are captured; None outside of a capture.
    """

    def __init__(self, run: StageRun) -> None:
        super().__init__(run)
        self.kept: list[Any] | None = None

    def forward(
        self, microbatch: int, boundary: list[Any], leaves: tuple[Any, ...], key: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        if self.kept is None:
            return self.run.forward(microbatch, boundary, leaves, key)
        self.kept += boundary
        return [self._like(each) for each in self.outputs], [torch.zeros(()) for _ in self.results]

    def backward(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        if self.kept is None:
            return self.run.backward(microbatch, tangents, seed, leaves, key)
        return self._returned(tangents)

    def backward_input(
        self, microbatch: int, tangents: dict[int, Tensor], seed: Tensor, leaves: tuple[Any, ...], key: Tensor
    ) -> list[list[Tensor]]:
        if self.kept is None:
            return self.run.backward_input(microbatch, tangents, seed, leaves, key)
        return self._returned(tangents)

    def backward_weight(self, microbatch: int, seed: Tensor, leaves: tuple[Any, ...], key: Tensor) -> None:
        if self.kept is None:
            self.run.backward_weight(microbatch, seed, leaves, key)

    def recompute(self, microbatch: int, leaves: tuple[Any, ...], key: Tensor) -> None:
        if self.kept is None:
            self.run.recompute(microbatch, leaves, key)

    def _returned(self, tangents: dict[int, Tensor]) -> list[list[Tensor]]:
        assert self.kept is not None
        self.kept += tangents.values()
        return [[self._like(self.boundary[place]) for place in places] for places in self.returned.values()]

    def _like(self, each: Boundary) -> Tensor:
        return torch.zeros(each.shape, dtype=each.dtype, device=self.run.device)
