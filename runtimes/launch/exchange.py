"""Exchange of plain data between the processes of a team, also from a thread while training goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Exchange(ABC):
    """Processes that send each other values.

    Attributes:
        number: of this process, in the order of the team's devices.
        count: how many processes there are.
    """

    number: int
    count: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order. All processes call this together."""


class OneProcess(Exchange):
    """The exchange of a team whose devices are threads of one process."""

    def __init__(self) -> None:
        self.number, self.count = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class RankExchange(Exchange):
    """The exchange of ranks.

    Args:
        number: of this rank's device among all devices.
        gather: returns the values of all ranks, in the order of their devices.
        count: how many ranks there are.
    """

    def __init__(self, number: int, count: int, gather: Callable[[Any], list[Any]]) -> None:
        self.number, self.count, self._gather = number, count, gather

    def gather(self, value: Any) -> list[Any]:
        return self._gather(value)
