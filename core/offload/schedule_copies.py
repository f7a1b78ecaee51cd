"""The copies of a schedule of abstract stages: each saves one storage, and no two devices share a link."""

from collections.abc import Sequence

from ..actions import Action
from ..costs.costs import StageCosts, StageEdge
from ..evaluate.host_queue import TimedCopy
from ..evaluate.latest_times import latest_times
from ..evaluate.reference import evaluate
from ..plan.offload import Storage
from .choice import Offloadable, choose_offload, of_stages
from .host_links import HostLink, same_links
from .timed_copies import timed_copies

FREE_S_PER_BYTE = 1e-15
"""Seconds per byte of a copy that takes no time."""


def schedule_copies(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    offload: Sequence[tuple[int, float]],
    *,
    hop_s: float,
    copy_s_per_byte: float,
) -> list[list[TimedCopy]]:
    """The copies of each device, with their positions and times.

    Args:
        orders, placement, costs, hop_s: of the schedule.
        offload: stages with the share of their saved tensors that is offloaded.
        copy_s_per_byte: time of a copy in either direction, per byte.
    """
    edges = [StageEdge(stage, stage + 1, 1, 1) for stage in range(len(placement) - 1)]
    result = evaluate(orders, placement, costs, edges=edges, hop_s=hop_s)
    rate = 1 / max(copy_s_per_byte, FREE_S_PER_BYTE)
    links = same_links(len(orders), HostLink(rate, rate))
    storages = [(Storage("saved tensors", round(cost.saved_bytes)),) for cost in costs]
    task = Offloadable(
        orders, latest_times(orders, placement, costs, result, edges=edges, hop_s=hop_s), costs, storages, links
    )
    return timed_copies(orders, placement, choose_offload(task, of_stages(dict(offload))), links)
