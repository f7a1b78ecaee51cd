"""Which storages of which microbatches a device offloads, for given orders.

A device offloads a share of the bytes that its stages save (see :mod:`.device_choice`). The share is

- as large as the link carries, if everything should be offloaded;
- the smallest one with which the device is within its limit, if there is one;
- the requested one of each stage.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from attrs import evolve, frozen

from ..actions import BACKWARD_KINDS, Action
from ..costs.costs import StageCosts
from ..evaluate.coding import INFINITY
from ..evaluate.latest_times import Times
from ..plan.offload import HostCopy, StageOffload, Storage
from .copy_times import Clock
from .device_choice import DeviceChoice, Shares
from .host_links import HostLinks


@frozen(slots=False, eq=False)
class Offloadable:
    """Orders whose saved tensors may be offloaded.

    Args:
        orders: per device its compute order.
        times: times at which their actions may run without a longer step; the latest ones leave most time for copies.
        costs: per stage.
        storages: per stage those that may be offloaded.
        links: the links between devices and hosts.
        recompute: the stages that recompute; they offload nothing.
        queues: host-copy queues of each device: 1 for both directions, or 2.
        host_limits: per device the bytes of the host's memory that a choice within limits may use.
    """

    orders: Sequence[Sequence[Action]]
    times: Times
    costs: Sequence[StageCosts]
    storages: Sequence[Sequence[Storage]]
    links: HostLinks
    recompute: tuple[int, ...] = ()
    queues: int = 1
    host_limits: Sequence[float] | None = None

    @cached_property
    def choices(self) -> tuple[DeviceChoice, ...]:
        """The choices of every device."""
        return tuple(self._choice(device) for device in range(len(self.orders)))

    @cached_property
    def slowed(self) -> "Offloadable":
        """The same with the rates that links have while all devices copy."""
        return evolve(self, links=self.links.contended())

    def _choice(self, device: int) -> DeviceChoice:
        limit = INFINITY if self.host_limits is None else self.host_limits[device]
        order, clock, link = self.orders[device], _clock(self, device), self.links.links[device]
        return DeviceChoice(order, clock, self.costs, self.storages, link, self.recompute, self.queues, limit)

    def peaks_within(self, limits: Sequence[float]) -> list[float] | None:
        """What each device holds of saved tensors and workspace with the least offload within its limit, if no other
        device copies; None if one exceeds its limit even so.

        Args:
            limits: bytes per device.
        """
        found: list[float] = []
        for choice, limit in zip(self.choices, limits, strict=True):
            peak = choice.peak_within(limit)
            if peak > limit:
                return None
            found.append(peak)
        return found


def _clock(task: Offloadable, device: int) -> Clock:
    """Times of a device's actions; one that recomputes first begins with that."""
    starts = [
        start - task.costs[action.stage].second_forward_s
        if action.stage in task.recompute and action.kind in BACKWARD_KINDS
        else start
        for action, start in zip(task.orders[device], task.times[0][device], strict=True)
    ]
    return Clock(starts, task.times[1][device])


Picks = Callable[[int, DeviceChoice], Shares]
"""(device, its choices) → the shares of its stages that are offloaded."""


def everything(_: int, choice: DeviceChoice) -> Shares:
    """As much as the link carries."""
    return choice.shares(choice.most_that_the_link_carries())


def within(limits: Sequence[float]) -> Picks:
    """The least offload with which every device holds at most its limit of saved tensors and workspace.

    Args:
        limits: bytes per device.
    """
    return lambda device, choice: choice.shares(choice.fewest_within(limits[device]))


def of_stages(shares: Shares) -> Picks:
    """These shares of the stages."""
    return lambda _, __: shares


def choose_offload(task: Offloadable, pick: Picks) -> tuple[StageOffload, ...]:
    """The offload of every stage, with the positions of its copies.

    Args:
        task: the orders. Each device plans its copies at the rate of its link as if it were the only one that copies;
            with ``task.slowed`` at the rate that the link has while all devices copy.
        pick: chooses what each device offloads.

    Returns:
        The offloading stages, in order.
    """
    storages: dict[int, tuple[Storage, ...]] = {}
    copies: dict[int, list[HostCopy]] = {}
    for device, choice in enumerate(task.choices):
        chosen = choice.chosen(pick(device, choice))
        for (stage, microbatch), copy in zip(chosen.labels, choice.copies(chosen), strict=True):
            if copy is not None:
                storages[stage] = chosen.storages[stage]
                freed_at, reload_after = choice.order[copy.freed_at], choice.order[copy.reload_after]
                copies.setdefault(stage, []).append(HostCopy(microbatch, freed_at, reload_after))
    return tuple(
        StageOffload(stage, storages[stage], tuple(sorted(copies[stage], key=lambda copy: copy.microbatch)))
        for stage in sorted(copies)
    )
