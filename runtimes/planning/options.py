"""The user's options of an automatic plan, and how plans are scored."""

from attrs import Factory, field, frozen

from ...core.cluster.cluster import with_limit
from ...core.offload.request import OffloadRequest
from ...core.policies.sharding import NONE
from ...core.schedules.problem import ScheduleFamily
from ...core.schedules.registry import families, find_family, resident_families
from ...core.search import Oracle
from ..settings import AUTO, Auto, Memory, values_of


def _families(options: "PlanningOptions") -> list[ScheduleFamily]:
    if not options.anneal:
        return [find_family(options.schedule)]
    return resident_families() if options.offload == "none" else list(families().values())


@frozen(kw_only=True)
class PlanningOptions(Auto):
    """How an automatic plan is searched.

    Args:
        oracle: scores a plan whose stages are measured.
        cut_oracle: scores a plan during the search for cuts; a fast one.
        memory: what the devices may hold, and what leaves them.

    Attributes:
        families: the schedules to choose among.
    """

    oracle: Oracle
    cut_oracle: Oracle
    memory: Memory = field(factory=Memory)
    families: list[ScheduleFamily] = field(init=False, default=Factory(_families, takes_self=True))

    @classmethod
    def of(cls, auto: Auto, memory: Memory, oracle: Oracle, cut_oracle: Oracle) -> "PlanningOptions":
        """The options of the user's groups."""
        given = values_of(auto, Auto)
        if auto.cluster is not None:
            given["cluster"] = with_limit(auto.cluster, memory.limit)
        return cls(**given, memory=memory, oracle=oracle, cut_oracle=cut_oracle)

    @property
    def offload(self) -> OffloadRequest:
        """What leaves the devices between F and the backward."""
        return "none" if self.memory.offload is None else self.memory.offload

    @property
    def shard(self) -> str:
        """What replicas share (see ``core/policies/sharding``): a level, or ``"auto"``."""
        return self.memory.shard or NONE

    @property
    def anneal(self) -> bool:
        """Whether orders of actions may differ from those of the schedules."""
        return self.schedule == AUTO
