"""The interface of a team to its tensor ranks; `TensorRanks` of ``tensor_parallel`` implements it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from attrs import frozen
from torch import Tensor, nn

from ...core.capture.regions.breaks import StepFunction
from ...core.cluster.mesh import Mesh
from ...core.costs.reductions import TensorReductions
from ...core.plan.plan import Plan


@frozen
class Split:
    """How a tensor is divided over tensor ranks: into equal parts along one dimension.

    Args:
        dim: the dimension.
        part: the number of this rank's part.
        parts: how many there are.
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


class TensorTeam(Protocol):
    """The ranks that share each stage with this one."""

    @property
    def model(self) -> nn.Module:
        """The user's model, with DTensors."""

    @property
    def linked(self) -> Any:
        """Keeps the user's model and the parts of this rank equal."""

    @property
    def split(self) -> frozenset[str]:
        """Names of the parameters of which each rank has a part."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job in this rank's group."""

    @property
    def size(self) -> int:
        """Their number."""

    @property
    def data(self) -> int:
        """Number of batches of a step: of replicas, each of which has all tensor ranks."""

    def mesh(self, groups: Sequence[Sequence[int]]) -> Mesh:
        """The mesh of the job, from the groups of all its ranks."""

    def planned(self, plan: Plan, mesh: Mesh) -> Plan:
        """A plan for that mesh."""

    def communicating(self) -> AbstractContextManager[None]:
        """A context in which collectives in programs reach the other ranks."""

    def check(self, compiled: Iterable[Any]) -> None:
        """Refuse programs whose results would differ from those of one process."""

    def split_of(self, name: str, shape: tuple[int, ...]) -> Split | None:
        """How a tensor of this shape that belongs to a parameter is divided; None if every rank has all of it."""

    def gather(self, part: Tensor, split: Split) -> Tensor:
        """The whole of a tensor of which each rank has a part, on the CPU. All of them call this together."""

    def shown(self, plan: Plan, reductions: Mapping[str, TensorReductions | None]) -> Plan:
        """The plan of all ranks as a plan that has tensor ranks."""

    def check_equal(self, replicas: Sequence[Sequence[Sequence[float]]]) -> None:
        """Refuse results that differ between the ranks."""

    def step_of(self, function: StepFunction) -> StepFunction:
        """A function of the model as a function of this rank's parts."""

    def refuse(self, what: str) -> NoReturn:
        """Refuse what is not supported."""
