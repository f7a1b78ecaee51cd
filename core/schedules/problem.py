"""The input of a schedule's builder (the problem), its output (the schedule), and placements: which device runs each
stage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from ..actions import Action
from ..arguments import whole_number
from ..costs.costs import StageCosts
from ..errors import InfeasibleError, RequestError


def looped_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Stage s on device s mod ``devices``: the pipeline runs ``chunks`` times around the devices."""
    return tuple(stage % devices for stage in range(devices * chunks))


def folded_placement(devices: int, chunks: int) -> tuple[int, ...]:
    """Alternating forward and backward over the devices: a V for two chunks, a W for four."""
    there = list(range(devices))
    return tuple(device for chunk in range(chunks) for device in (there if chunk % 2 == 0 else reversed(there)))


def refuse_unfolded(name: str, chunks: int) -> None:
    """Refuse a number of chunks with which a model is not folded once. Raises RequestError."""
    if chunks != 2:
        raise RequestError(f"chunks is {chunks}: {name} folds the model once, so each device has 2 stages; give 2")


def hooked_placement(devices: int) -> tuple[int, ...]:
    """The fold for two chunks, with the last two devices swapped in the second half.

    The last two devices' passes are adjacent in pairs, which leaves wider gaps: with little memory it can be faster
    than the fold, for one more hop (found by search over all placements of four devices and two chunks).
    """
    folded = list(folded_placement(devices, 2))
    folded[devices], folded[devices + 1] = folded[devices + 1], folded[devices]
    return tuple(folded)


def _costs(given: Sequence[StageCosts] | None) -> tuple[StageCosts, ...] | None:
    return None if given is None else tuple(given)


@frozen
class ScheduleProblem:
    """The input of a schedule's builder.

    Args:
        devices: devices along the pipeline.
        microbatches: microbatches in one step.
        chunks: stages that each device holds.
        costs: per stage (``devices × chunks`` of them), or None for equal stages.
        hop_s: delay of a message between two neighbouring devices, in the unit of ``costs``.
        memory_limit: bytes (or the unit of ``costs``) of saved tensors that a device may hold, or None.
        copy_s_per_byte: time of a copy of saved tensors to the host, or back, per byte (or unit of ``costs``).

    Raises:
        RequestError: a count is below 1, the costs are not one per stage, or a delay or limit is negative.
    """

    devices: int
    microbatches: int
    chunks: int = 1
    costs: tuple[StageCosts, ...] | None = field(default=None, converter=_costs)
    hop_s: float = 0.0
    memory_limit: float | None = None
    copy_s_per_byte: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name in ("devices", "microbatches", "chunks"):
            whole_number(name, getattr(self, name), 1)
        if self.costs is not None and len(self.costs) != self.stages:
            raise RequestError(
                f"there are costs of {len(self.costs)} stages: {self.devices} devices with {self.chunks} chunks each "
                f"have {self.stages}; give one for each"
            )
        if not 0 <= self.hop_s < float("inf"):
            raise RequestError(f"the delay of a hop is {self.hop_s}: it must be finite and at least 0")
        if self.memory_limit is not None and not self.memory_limit >= 0:
            raise RequestError(f"the memory limit is {self.memory_limit}: it must be at least 0")
        if not 0 <= self.copy_s_per_byte < float("inf"):
            raise RequestError(f"a copy takes {self.copy_s_per_byte} per byte: it must be finite and at least 0")

    @property
    def stages(self) -> int:
        """Stages along the whole pipeline."""
        return self.devices * self.chunks


@frozen
class Schedule:
    """A compute order.

    Args:
        name: with its parameters, such as ``interleaved-1f1b(chunks=2)``.
        placement: device of every stage.
        microbatches: microbatches in one step.
        device_actions: per device F, I, W and B in order.
        offload: stages whose saved tensors are offloaded, each with the share of its bytes; when they are copied
            follows from the times of the stages and the links (``core/offload``).
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    device_actions: tuple[tuple[Action, ...], ...]
    offload: tuple[tuple[int, float], ...] = ()


Builder = Callable[..., Schedule]
"""A schedule's builder, ``(problem, **parameters) -> Schedule``: pure, deterministic. It returns a complete order that
cannot deadlock, and raises RequestError if the schedule does not support the problem or a parameter is wrong."""


def no_parameters(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """The candidates of a family without parameters: one empty set."""
    return ({},)


@frozen
class ScheduleFamily:
    """One named family of schedules.

    Args:
        name: its published name.
        build: the builder.
        summary: one line for display, with its source.
        split_backward: whether it uses I and W.
        chunks: the supported numbers of chunks per device; None for any.
        usual_chunks: the default number of chunks per device.
        placement: (devices, chunks) → device of every stage; partitioning needs it before building.
        candidates: parameter sets that a search should try for a problem; ``build`` accepts each of them.
        offloads: whether its schedules offload; a search that may not offload skips the family.
    """

    name: str
    build: Builder
    summary: str
    split_backward: bool = False
    chunks: tuple[int, ...] | None = None
    usual_chunks: int = 1
    placement: Callable[[int, int], tuple[int, ...]] = looped_placement
    candidates: Callable[[ScheduleProblem], Iterable[Mapping[str, Any]]] = no_parameters
    offloads: bool = False

    def supports(self, problem: ScheduleProblem) -> bool:
        """Whether the family supports the problem's number of chunks per device."""
        return self.chunks is None or problem.chunks in self.chunks

    def candidates_of(self, problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
        """The parameter sets to try for a problem; none if it is not supported."""
        return self.candidates(problem) if self.supports(problem) else ()

    def built(self, problem: ScheduleProblem, parameters: Mapping[str, Any]) -> Schedule | None:
        """The schedule; None if the family refuses to build it, for the problem or its memory limit."""
        try:
            return self.build(problem, **parameters)
        except (RequestError, InfeasibleError):
            return None


def resident(families: Iterable[ScheduleFamily]) -> tuple[ScheduleFamily, ...]:
    """The families whose schedules keep all saved tensors on the device."""
    return tuple(family for family in families if not family.offloads)
