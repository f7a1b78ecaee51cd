"""Why saved tensors stay on the device in a plan that offloads.

A microbatch's tensors wait from the end of F to the start of B or I. Where that is shorter than their copies there and
back take on free links, or their device reaches no host, they cannot leave. All others stay because the plan does not
offload them: there is memory for them, or the link carries no more.
"""

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..actions import Action, Kind
from ..cluster.cluster import Cluster
from ..cluster.routing import path_latency_s, path_rate, reverse
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..plan.memory_policy import backward_of
from ..plan.plan import Plan

RECOMPUTES = "the stage recomputes them"
NO_HOST = "their device reaches no host"
TOO_SHORT = "their backward follows sooner than the copies to the host and back take"
NOT_CHOSEN = "the plan does not offload these microbatches"
REST = "the plan does not offload these storages"


@frozen
class NotOffloaded:
    """Saved tensors of one stage that stay on the device.

    Args:
        bytes: of each of them.
        reason: why, for people.
        waits_s: the shortest and the longest time that they wait for their backward; None if that is not the reason.
        copies_s: time of their copies there and back on free links; None if that is not the reason.
    """

    stage: int
    microbatches: int
    bytes: float
    reason: str
    waits_s: tuple[float, float] | None = None
    copies_s: float | None = None


def tensors_not_offloaded(
    plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, spans: Mapping[Action, tuple[float, float]]
) -> tuple[NotOffloaded, ...]:
    """What stays of every stage, with the reason; empty for a plan that offloads nothing.

    Args:
        spans: start and end of the compute actions of the first replica, in seconds.
    """
    result: list[NotOffloaded] = []
    offloads = {each.stage: each for each in plan.memory.offload}
    for stage, cost in enumerate(costs if offloads else ()):
        own = offloads.get(stage)
        offloaded = {copy.microbatch for copy in own.copies} if own is not None else set()
        stays = [microbatch for microbatch in range(plan.microbatches) if microbatch not in offloaded]
        if stage in plan.memory.recompute:
            result.append(NotOffloaded(stage, plan.microbatches, cost.saved_bytes, RECOMPUTES))
            continue
        if own is not None and cost.saved_bytes > own.bytes:
            result.append(NotOffloaded(stage, len(offloaded), cost.saved_bytes - own.bytes, REST))
        if cost.saved_bytes:
            size = cost.saved_bytes if own is None else own.bytes
            copies_s = _copies_s(cluster, plan.placement[stage], size)
            if copies_s is None:
                result.append(NotOffloaded(stage, len(stays), cost.saved_bytes, NO_HOST))
                continue
            waits = [_wait_s(spans, stage, microbatch) for microbatch in stays]
            short = [wait for wait in waits if wait < copies_s]
            if short:
                wait = min(short), max(short)
                result.append(NotOffloaded(stage, len(short), cost.saved_bytes, TOO_SHORT, wait, copies_s))
            if len(waits) > len(short):
                result.append(NotOffloaded(stage, len(waits) - len(short), cost.saved_bytes, NOT_CHOSEN))
    return tuple(result)


def _copies_s(cluster: Cluster, device: int, size: float) -> float | None:
    """Seconds of the copies to the host and back; None if the device reaches no host."""
    try:
        path = cluster.host_path(device)
    except RequestError:
        return None
    return 2 * path_latency_s(path) + size / path_rate(path) + size / path_rate(reverse(path))


def _wait_s(spans: Mapping[Action, tuple[float, float]], stage: int, microbatch: int) -> float:
    """Seconds from the end of F to the start of the backward."""
    return spans[backward_of(stage, microbatch, spans)][0] - spans[Action(stage, Kind.F, microbatch)][1]
