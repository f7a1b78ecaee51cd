"""What stages with graphs and stages next to them share: they wrap the stage that has the programs."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ....core.actions import Kind
from ..linked_stage import CapturedStage
from ..stage_run import StageRun


class WrappedStage(CapturedStage):
    """A stage that wraps another one, and answers for it.

    Args:
        run: the other stage.
    """

    def __init__(self, run: StageRun) -> None:
        super().__init__(run.index, run.boundary, run.outputs, run.results, run.layout, run.state, run.batch)
        self.run = run

    def warm_up(self, kinds: Collection[Kind], leaves: tuple[Any, ...], key: Tensor, seed: Tensor) -> None:
        self.run.warm_up(kinds, leaves, key, seed)

    def saved(self, microbatch: int) -> list[Any]:
        return self.run.saved(microbatch)

    def held(self, microbatch: int) -> list[Any]:
        return self.run.held(microbatch)

    def free_shared(self) -> None:
        self.run.free_shared()

    @property
    def shared_bytes(self) -> int:
        return self.run.shared_bytes

    @property
    def persistent(self) -> set[int]:
        return self.run.persistent
