"""What a schedule is built for, and what building one gives."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import field, frozen

from ..actions import Action
from ..costs import StageCosts


@frozen
class ScheduleProblem:
    """What a schedule may look at.

    Args:
        devices: devices along the pipeline.
        microbatches: microbatches in one step.
        chunks: stages that each device holds.
        costs: per stage (``devices × chunks`` of them), or None: then every stage costs the same.
        hop_s: delay of a message between two neighbouring devices, in the unit of ``costs``.
        memory_limit: bytes (or the unit of ``costs``) of saved tensors a device may hold, or None.
    """

    devices: int
    microbatches: int
    chunks: int = 1
    costs: tuple[StageCosts, ...] | None = None
    hop_s: float = 0.0
    memory_limit: float | None = None

    @property
    def stages(self) -> int:
        return self.devices * self.chunks


@frozen
class Schedule:
    """A compute order.

    Args:
        name: with its parameters, such as ``interleaved-1f1b(chunks=2)``.
        placement: device of every stage.
        microbatches: microbatches in one step.
        device_actions: per device F, I, W and B in order.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    device_actions: tuple[tuple[Action, ...], ...]


class Builder(Protocol):
    """A schedule's builder: pure, deterministic.

    Raises:
        RequestError: the problem is one that this schedule is not made for.
    """

    def __call__(self, problem: ScheduleProblem, **parameters: Any) -> Schedule: ...


@frozen
class ScheduleFamily:
    """One named family of schedules.

    Args:
        name: its published name.
        build: makes one.
        summary: one line for people, with its source.
        candidates: parameter sets that a search should try for a problem.
        split_backward: whether it uses I and W.
    """

    name: str
    build: Builder
    summary: str
    split_backward: bool = False
    candidates: tuple[Mapping[str, Any], ...] = field(default=({},))
