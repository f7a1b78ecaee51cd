"""The choices of a search: schedules, orders, stages per device, recomputation."""

from attrs import frozen

from ...plan.derive import Recompute
from ...schedules.problem import ScheduleFamily
from .options import MAX_CHUNKS


@frozen
class SearchSpace:
    """The choices of a search.

    Args:
        families: the schedules to choose among.
        anneal: whether orders may differ from the families'.
        chunks: fewest and most stages per device.
        recompute: see ``SearchOptions``.
    """

    families: tuple[ScheduleFamily, ...]
    anneal: bool = True
    chunks: tuple[int, int] = (1, MAX_CHUNKS)
    recompute: Recompute | None = "none"
