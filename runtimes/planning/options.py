"""The user's options of an automatic plan."""

from pathlib import Path
from typing import Any

from attrs import Factory, field, frozen

from ...core.cluster.catalog import find_cluster
from ...core.cluster.cluster import Cluster
from ...core.errors import RequestError
from ...core.offload.request import OffloadRequest, check_offload_request
from ...core.plan.derive import Recompute
from ...core.plan.sharding import AUTO as SHARD_AUTO
from ...core.plan.sharding import NONE, check_level
from ...core.schedules.problem import ScheduleFamily
from ...core.schedules.registry import families, find_family, resident_families
from ...core.search import Oracle
from ...core.search.problem.blocks import check_boundaries
from ...core.whole_numbers import whole_number
from ..offload.tier import OffloadTier
from .contest import contest_rounds

AUTO = "auto"
"""The schedule ``auto``: any schedule, and orders of actions of no schedule."""


def _found(cluster: Cluster | str | Path | None) -> Cluster | None:
    return find_cluster(cluster) if isinstance(cluster, str | Path) else cluster


def _chunks(given: Any) -> int:
    return whole_number("max_chunks", given, 1)


def _families(options: "PlanningOptions") -> list[ScheduleFamily]:
    if not options.anneal:
        return [find_family(options.schedule)]
    return resident_families() if options.offload == "none" else list(families().values())


@frozen(kw_only=True)
class PlanningOptions:
    """How an automatic plan is searched.

    Args:
        oracle: scores a plan whose stages are measured.
        cut_oracle: scores a plan during the search for cuts; a fast one.
        schedule: name of the only schedule, or ``"auto"``.
        max_chunks: largest number of stages per device.
        cluster: the machine: a Cluster, its file, or its name in the catalog; None measures the machine at hand.
        recompute: ``"none"``, ``"all"`` or the stages that recompute; None lets the planner choose.
        offload: what leaves the devices between F and the backward (see ``core/offload/request``).
        tier: where it goes.
        shard: what replicas share (see ``core/plan/sharding``): a level, or ``"auto"``.
        contest: whether the first steps compare plans, or how many steps of each they run at least. As an attribute,
            the number of rounds of the contest (see `contest`); 0 for none.
        cached: whether plans are cached on disk.
        boundaries: where stages may end (see ``Blocks``).

    Attributes:
        families: the schedules to choose among.

    Raises:
        RequestError: the schedule or the cluster is unknown, or shard, contest or cached is invalid.
    """

    oracle: Oracle
    cut_oracle: Oracle
    schedule: str = AUTO
    max_chunks: int = field(default=2, converter=_chunks)
    cluster: Cluster | None = field(default=None, converter=_found)
    recompute: Recompute | None = None
    offload: OffloadRequest = "none"
    tier: OffloadTier = field(factory=OffloadTier)
    shard: str = NONE
    contest: int = field(default=True, converter=contest_rounds)
    cached: bool = False
    boundaries: str = "operators"
    families: list[ScheduleFamily] = field(init=False, default=Factory(_families, takes_self=True))

    def __attrs_post_init__(self) -> None:
        check_offload_request(self.offload)
        check_boundaries(self.boundaries)
        check_level(self.shard, SHARD_AUTO)
        if not isinstance(self.cached, bool):
            raise RequestError(f"plan_cache is {self.cached!r}: give True or False; PANPIPE_CACHE names the folder")

    @property
    def anneal(self) -> bool:
        """Whether orders of actions may differ from those of the schedules."""
        return self.schedule == AUTO
