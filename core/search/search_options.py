"""Options of a search for plans: its choices, its oracle and its budget."""

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from ..costs.message_overhead import FREE, MessageLine
from ..errors import RequestError
from ..offload.request import OffloadRequest, check_offload_request
from ..plan.memory_policy import Storage
from ..policies.recompute import Recompute
from ..policies.sharding import AUTO, NONE, level_and_sharers
from ..schedules.problem import ScheduleFamily
from .problem.meter import Meter, Progress
from .problem.oracle import Oracle, longest_path

MAX_CHUNKS = 8

Names = tuple[tuple[str, ...], ...]
"""The operators of every stage."""


def _families(families: Sequence[ScheduleFamily]) -> tuple[ScheduleFamily, ...]:
    return tuple(families)


@frozen(kw_only=True)
class SearchOptions:
    """How plans are searched.

    Args:
        families: the schedules to choose from.
        oracle: its score decides between the best plans. The search itself counts a message as a pure delay.
        judge: its step times decide between the best plans where messages share links, if the oracle does not count
            that; predictions remain the oracle's. None for no such decision.
        anneal: whether a device's order may differ from the family's (the schedule ``auto``).
        recompute: ``"none"``, ``"all"`` or the stages that recompute; None chooses them if memory is short.
        memory_limit: bytes that a device may use, if less than its memory.
        min_chunks, max_chunks: fewest and most stages of a device. If stages are given, their number decides. With the
            defaults operators may also be placed freely: a device then may have more stages than others.
        message: time that a message takes of the devices at its ends, in addition to its time on the link.
        alternatives: whether the result has slower plans that need less memory, too.
        seed: of all random numbers.
        budget: most evaluations of all parts of the search together, in addition to the schedules that it starts from;
            by default about ten seconds of one core.
        seconds: a limit on the time; at its end the best plan so far is the result.
        progress: called repeatedly during the search.
        offload: what leaves the devices; with ``"none"`` families that offload are used only if all of them do.
        storages: for stages (the names of their operators) whose programs are known, the storages of each that may
            leave; for others one storage for each operator that saves enough.
        shard: what replicas share: a level (see ``policies/sharding``) for all stages, or ``auto``, which shards the
            stages that do not fit otherwise.
        until_fit: end with the first plans that fit in memory: a small part of the whole search, which finds one if
            this does.

    Raises:
        RequestError: budget or ``min_chunks`` is below 1, or ``shard`` is no level.
    """

    families: tuple[ScheduleFamily, ...] = field(converter=_families)
    oracle: Oracle = longest_path
    judge: Oracle | None = None
    anneal: bool = True
    recompute: Recompute | None = "none"
    memory_limit: float | None = None
    min_chunks: int = 1
    max_chunks: int = MAX_CHUNKS
    message: MessageLine = FREE
    alternatives: bool = True
    seed: int = 0
    budget: int | None = None
    seconds: float | None = None
    progress: Progress | None = None
    offload: OffloadRequest = "none"
    storages: Mapping[Names, Sequence[Sequence[Storage]]] = field(factory=dict)
    until_fit: bool = False
    shard: str = NONE

    def __attrs_post_init__(self) -> None:
        refuse_none(1 if self.budget is None else self.budget, "evaluations: a search")
        refuse_none(self.min_chunks, "chunks: a device")
        check_offload_request(self.offload)
        level_and_sharers(self.shard, AUTO)

    @property
    def offloads(self) -> bool:
        """Whether saved tensors may leave the devices: by request, or because only schedules that offload are given."""
        return self.offload != "none" or (bool(self.families) and all(family.offloads for family in self.families))

    @property
    def chunks(self) -> tuple[int, int]:
        """Fewest and most stages per device."""
        return self.min_chunks, self.max_chunks

    def meter(self, budget: int, first: float = 1.0) -> Meter:
        """A meter that counts from now on.

        Args:
            budget: number of evaluations of the first part of the search if the options have none.
            first: share of the options' budget for the first part.
        """
        wanted = budget if self.budget is None else max(int(first * self.budget), 1)
        return Meter(wanted, self.seconds, self.progress, until_fit=self.until_fit, most=self.budget)


def refuse_none(count: int, what: str) -> None:
    """Refuse a count below 1. Raises RequestError."""
    if count < 1:
        raise RequestError(f"{count} {what} needs at least 1")
