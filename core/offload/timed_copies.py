"""Copies with the positions and times that evaluation reads."""

from collections.abc import Sequence

from ..actions import Action, Kind
from ..evaluate.host_queue import TimedCopy
from ..plan.offload import StageOffload, backward_of
from .host_links import HostLinks


def timed_copies(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    offload: Sequence[StageOffload],
    links: HostLinks,
) -> list[list[TimedCopy]]:
    """The copies of each device, with their positions and times.

    Args:
        orders: per device its compute order.
        placement: device of every stage.
        offload: the offload of the plan's memory policy.
        links: between the devices and their hosts; a device that offloads has one.
    """
    found: list[list[TimedCopy]] = [[] for _ in orders]
    at: dict[int, dict[Action, int]] = {}
    for each in offload:
        device = placement[each.stage]
        if device not in at:
            at[device] = {action: position for position, action in enumerate(orders[device])}
        link = links.links[device]
        assert link is not None
        times = link.out_s(each.bytes), link.back_s(each.bytes)
        for copy in each.copies:
            forward = Action(each.stage, Kind.F, copy.microbatch)
            backward = backward_of(each.stage, copy.microbatch, at[device])
            found[device].append(
                TimedCopy(
                    at[device][forward], at[device][copy.freed_at], at[device][copy.reload_after],
                    at[device][backward], *times, each.bytes,
                )
            )  # fmt: skip
    return found
