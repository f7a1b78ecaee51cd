"""The copies of a schedule of abstract stages: each saves one storage, and no two devices share a link."""

from collections.abc import Sequence

from ..actions import Action
from ..costs.costs import StageCosts
from ..plan.memory_policy import StageOffload, Storage, TimedCopy
from ..timing.orders import latest_times
from .choice import Offloadable, choose_offload, of_stages
from .host_links import HostLink, HostLinks, same_links, timed_copies

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
    """The copies of each device, with their positions and times; arguments as in ``schedule_offload``."""
    chosen = schedule_offload(orders, placement, costs, offload, hop_s=hop_s, copy_s_per_byte=copy_s_per_byte)
    return timed_copies(orders, placement, chosen, _links(len(orders), copy_s_per_byte))


def schedule_offload(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    offload: Sequence[tuple[int, float]],
    *,
    hop_s: float,
    copy_s_per_byte: float,
) -> tuple[StageOffload, ...]:
    """What each stage offloads, and between which actions.

    Args:
        orders, placement, costs, hop_s: of the schedule.
        offload: stages with the share of their saved tensors that is offloaded.
        copy_s_per_byte: time of a copy in either direction, per byte.
    """
    storages = [(Storage("saved tensors", round(cost.saved_bytes)),) for cost in costs]
    latest = latest_times(orders, placement, costs, hop_s=hop_s)
    task = Offloadable(orders, latest, costs, storages, _links(len(orders), copy_s_per_byte))
    return choose_offload(task, of_stages(dict(offload)))


def _links(devices: int, copy_s_per_byte: float) -> HostLinks:
    rate = 1 / max(copy_s_per_byte, FREE_S_PER_BYTE)
    return same_links(devices, HostLink(rate, rate))
