"""What a team knows of its tensor ranks; `TensorRanks` of ``tensor_parallel`` implements it."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from ...core.cluster.mesh import Mesh


class TensorTeam(Protocol):
    """The ranks that share each stage with this one."""

    @property
    def model(self) -> nn.Module:
        """The user's model, with DTensors."""

    @property
    def linked(self) -> Any:
        """Keeps the user's model and the parts of this rank in step."""

    @property
    def split(self) -> frozenset[str]:
        """Names of the parameters of which each rank has a part."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job in this rank's group."""

    @property
    def size(self) -> int:
        """Their number."""

    def mesh(self, groups: Sequence[Sequence[int]]) -> Mesh:
        """The mesh of the job, from the groups of all its ranks."""

    def planned(self, plan: Any, mesh: Mesh) -> Any:
        """A plan for that mesh."""

    def communicating(self) -> AbstractContextManager[None]:
        """A context in which collectives in programs reach the other ranks."""

    def check(self, compiled: Iterable[Any]) -> None:
        """Refuse programs whose results would differ from those of one process."""

    def check_equal(self, rows: Sequence[Sequence[float]]) -> None:
        """Refuse results that differ between the ranks."""

    def step_of(self, function: Any) -> Any:
        """A function of the model as one of the parts."""

    def refuse(self, what: str) -> Any:
        """Refuse what is not supported."""
