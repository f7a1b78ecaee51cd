"""Exchange of plain data between the processes of a team, also from a thread while training goes on."""

from collections.abc import Callable
from typing import Any

from attrs import frozen


@frozen
class Exchange:
    """Processes that send each other values.

    Args:
        number: of this process, in the order of the team's devices.
        count: how many processes there are.
        gather: returns the values of all processes, in their order. All processes call it together.
    """

    number: int
    count: int
    gather: Callable[[Any], list[Any]]


ONE_PROCESS = Exchange(0, 1, lambda value: [value])
"""The exchange of a team whose devices are threads of one process."""
