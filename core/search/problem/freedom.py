"""What a search may change."""

from attrs import frozen

from ...plan.derive import Recompute
from ...schedules.problem import ScheduleFamily
from .options import MAX_CHUNKS


@frozen
class Freedom:
    """What a search may change.

    Args:
        families: the schedules to choose among.
        anneal: whether orders may depart from the families'.
        chunks: fewest and most stages a device.
        recompute: see ``SearchOptions``.
    """

    families: tuple[ScheduleFamily, ...]
    anneal: bool = True
    chunks: tuple[int, int] = (1, MAX_CHUNKS)
    recompute: Recompute | None = "none"
