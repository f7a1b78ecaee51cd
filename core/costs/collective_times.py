"""Measured times of the collectives over a stage's replicas.

In a step they take longer than alone: the ranks compute meanwhile, and ranks of one host share its cores and memory.
Over gloo, with four ranks on two cores, a reduction of 117 MB took 150 to 240 ms in steps where the links alone allow
18. What a backward sums while it runs is part of its own time.
"""

from attrs import evolve, frozen


@frozen
class CollectiveTimes:
    """The times of a stage's collectives, in seconds each; None for those that were not measured.

    Args:
        shard: what the replicas shared in the steps that were measured (see ``core/policies/sharding``).
        replicas: how many there were.
        reduce_s: of REDUCE_GRAD.
        scatter_s: of SCATTER_GRAD: what is left of it after the backward.
        gather_s: of UNSHARD.
    """

    shard: str
    replicas: int
    reduce_s: float | None = None
    scatter_s: float | None = None
    gather_s: float | None = None

    def scaled(self, ratio: float) -> "CollectiveTimes":
        """The same, each ``ratio`` times as long."""
        times = (self.reduce_s, self.scatter_s, self.gather_s)
        reduce_s, scatter_s, gather_s = (None if seconds is None else seconds * ratio for seconds in times)
        return evolve(self, reduce_s=reduce_s, scatter_s=scatter_s, gather_s=gather_s)
