"""What a rank has of the model's tensors: all of them, or parts that it shares with other ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from ...core.capture.regions.breaks import StepFunction
from ...core.cluster.mesh import Mesh, MeshShape
from ...core.costs.reductions import TensorReductions
from ...core.plan.plan import Plan


@frozen
class Split:
    """How a tensor is divided over tensor ranks: into equal parts along one dimension.

    Args:
        part: the number of this rank's part.
    """

    dim: int
    part: int
    parts: int

    def part_shape(self, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a part of a tensor of this shape; None if it cannot be divided."""
        if self.dim >= len(whole) or whole[self.dim] % self.parts:
            return None
        return (*whole[: self.dim], whole[self.dim] // self.parts, *whole[self.dim + 1 :])

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part, a view."""
        return whole.chunk(self.parts, self.dim)[self.part]


class RankTensors:
    """What this rank has of the model's tensors: all of those of its stages. `TensorRanks` has parts of them.

    Attributes:
        divided: whether several ranks share each stage, each with its parts.
    """

    divided = False

    @property
    def size(self) -> int:
        """The number of ranks that share each stage."""
        return 1

    @property
    def split(self) -> frozenset[str]:
        """Names of the parameters of which each of them has a part."""
        return frozenset()

    def program(self, model: nn.Module, step: StepFunction) -> tuple[nn.Module, StepFunction]:
        """The model and the step that this rank runs."""
        return model, step

    def step_of(self, function: StepFunction) -> StepFunction:
        """A function of the user's model as a function of the model that this rank runs."""
        return function

    def whole_model(self, model: nn.Module) -> nn.Module:
        """The user's model, of the one that this rank runs."""
        return model

    def follow(self) -> None:
        """Follow what the user changed in their model since the last step."""

    def publish_gradients(self) -> None:
        """Give the user's model the gradients of a step."""

    def release(self) -> None:
        """Free what the user's model has of other stages."""

    def mesh(self, asked: Mesh | None) -> Mesh | None:
        """The mesh of the job. All ranks call this together."""
        return asked

    def check_mesh(self, asked: Mesh | MeshShape | None, mesh: Mesh) -> None:
        """Refuse a mesh of the user that is not the job's."""

    def planned(self, plan: Plan, mesh: Mesh) -> Plan:
        """A plan for that mesh."""
        return plan

    def shown(self, plan: Plan, reductions: Callable[[], Mapping[str, TensorReductions | None]]) -> Plan:
        """The plan of all ranks as the user's."""
        return plan

    def communicating(self) -> AbstractContextManager[None]:
        """A context in which collectives in programs reach the other ranks."""
        return nullcontext()

    def check(self, compiled: Iterable[Any]) -> None:
        """Refuse programs whose results would differ from those of one process."""

    def check_equal(self, replicas: Callable[[], Sequence[Sequence[Sequence[float]]]]) -> None:
        """Refuse results that differ between the ranks that share stages."""

    def split_of(self, name: str, shape: tuple[int, ...]) -> Split | None:
        """How a tensor of this shape that belongs to a parameter is divided; None if every rank has all of it."""
        return None

    def gather(self, part: Tensor, split: Split) -> Tensor:
        """The whole of a tensor of which each rank has a part, on the CPU. All of them call this together."""
        return part

    def refuse(self, what: str) -> None:
        """Refuse what is not supported with parts of tensors."""


WHOLE = RankTensors()
"""Every rank has whole tensors."""
