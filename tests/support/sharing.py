"""Plans whose replicas share something, with runs where they share parameters."""

import math

from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.plan import Plan
from panpipe.core.policies.sharding import with_level
from panpipe.core.search.unsharded_runs import with_runs

from .plans import hosted

COST = StageCosts(1.0, 1.0, 1.0, parameter_bytes=80, gradient_bytes=80, optimizer_bytes=160, saved_bytes=100)


def shared(plan: Plan, level: str, *, room: bool = False) -> Plan:
    """The plan with one level for all stages.

    Args:
        plan: with its mesh.
        level: what replicas share.
        room: whether there is memory to keep parameters whole between runs; otherwise each run ends early.
    """
    return runs_of_all(with_level(plan, level), room=room)


def runs_of_all(plan: Plan, *, room: bool = False) -> Plan:
    """The plan with the runs of the stages whose replicas share parameters; arguments as of `shared`."""
    limits = [math.inf if room else 0.0] * plan.devices
    cluster = hosted(fully_connected(plan.mesh.ranks, 10**9, 40.0, 0.0), 40.0)
    return with_runs(plan, [COST] * len(plan.stages), cluster, limits)
