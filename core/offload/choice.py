"""Which storages of which microbatches a device offloads, for given orders, and what it then holds.

A device offloads a share of the bytes that its stages save. The share is

- as large as the link carries, if everything should be offloaded;
- the smallest one with which the device is within its limit, if there is one;
- the requested one of each stage.

Of a device's share, all of the stages whose saved tensors are held longest are offloaded, part of the next one, and
nothing of the others. Of that part, the largest storages are offloaded. If the storages are too coarse for the part,
all storages of evenly spread microbatches are. Microbatches whose tensors are not held long enough are never copied
(see :mod:`.copy_times`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import floor
from statistics import median

from attrs import evolve, frozen

from ..actions import BACKWARD_KINDS, Action, Kind
from ..costs.costs import StageCosts
from ..plan.memory import Memory, held_bytes, order_changes
from ..plan.memory_policy import HostCopy, StageOffload, Storage, TimedCopy, moved
from ..timing.coding import INFINITY
from ..timing.orders import Times
from .copy_times import Clock, Stay, long_enough, plan_copies, waits_s
from .host_links import HostLink, HostLinks

WAIT_SHARE = 0.015
"""Share of a step by which copies may delay a device, if as much is offloaded as the link carries."""
STEPS = 64
"""Steps of a device's share between nothing and everything."""
TRIED = 16
"""Shares that are tried, evenly spaced, where the link does not carry everything."""
COARSE = 1 / 32
"""Largest error of a stage's share for which its storages are divided, and not its microbatches."""

Shares = Mapping[int, float]
"""Stage → share of its bytes that is offloaded; stages that are not listed offload nothing."""


@frozen
class Chosen:
    """What a device offloads.

    Args:
        storages: per stage, the storages that are offloaded.
        stays: the saved tensors of each offloaded microbatch, with the actions between which they are held.
        labels: stage and microbatch of each stay.
    """

    storages: dict[int, tuple[Storage, ...]]
    stays: tuple[Stay, ...]
    labels: tuple[tuple[int, int], ...]


class DeviceChoice:
    """The choices of one device.

    Args:
        order: its compute order.
        clock: when its actions run.
        costs: per stage.
        storages: per stage those that may be offloaded; of stages that do not recompute.
        link: between the device and its host; None if it reaches none.
        recompute: the stages that recompute.
        queues: host-copy queues: 1 for both directions, or 2.
        host_limit: bytes of the host's memory that a choice within limits may use.
    """

    def __init__(
        self,
        order: Sequence[Action],
        clock: Clock,
        costs: Sequence[StageCosts],
        storages: Sequence[Sequence[Storage]],
        link: HostLink | None,
        recompute: tuple[int, ...] = (),
        queues: int = 1,
        host_limit: float = INFINITY,
    ) -> None:
        self.order, self.clock, self._link, self._queues = order, clock, link, queues
        self._host_limit = host_limit
        self._where = _stays(order)
        self._storages = {
            stage: sorted(storages[stage], key=lambda storage: -storage.bytes)
            for stage in self._longest_first()
            if link is not None and stage not in recompute and storages[stage]
        }
        self._sizes = {stage: sum(storage.bytes for storage in own) for stage, own in self._storages.items()}
        self._changes = order_changes(order, costs, recompute, workspace=True)
        self._peaks: dict[int, float] = {}

    def _longest_first(self) -> list[int]:
        """The stages, in descending order of the time for which their saved tensors are held."""
        lengths: dict[int, list[float]] = {}
        for (stage, _), (forward, reader) in self._where.items():
            lengths.setdefault(stage, []).append(self.clock.starts[reader] - self.clock.ends[forward])
        return sorted(lengths, key=lambda stage: (-median(lengths[stage]), stage))

    def shares(self, step: int) -> Shares:
        """Share of each stage if ``step`` of ``STEPS`` parts of the device's bytes are offloaded."""
        left = step / STEPS * sum(self._sizes.values())
        found = {}
        for stage, size in self._sizes.items():
            if left <= 0:
                break
            found[stage] = 1.0 if step == STEPS else min(left / size, 1.0)
            left -= size
        return found

    def chosen(self, shares: Shares) -> Chosen:
        """The storages and microbatches that are offloaded for these shares."""
        storages: dict[int, tuple[Storage, ...]] = {}
        each: dict[int, tuple[int, float]] = {}  # stage → bytes of a microbatch, share of the microbatches
        for stage, own in self._storages.items():
            if shares.get(stage, 0.0) > 0:
                storages[stage], part = _divided(own, shares[stage])
                each[stage] = sum(storage.bytes for storage in storages[stage]), part
        stays, labels = [], []
        for (stage, microbatch), (forward, reader) in self._where.items():
            if stage in each:
                size, part = each[stage]
                if floor((microbatch + 1) * part + 1e-9) > floor(microbatch * part + 1e-9):
                    assert self._link is not None
                    stays.append(Stay(forward, reader, self._link.out_s(size), self._link.back_s(size), size))
                    labels.append((stage, microbatch))
        return Chosen(storages, tuple(stays), tuple(labels))

    def copies(self, chosen: Chosen) -> list[TimedCopy | None]:
        """The copies of the offloaded tensors, at the rate of the device's link."""
        return plan_copies(self.clock, chosen.stays, self._queues)

    def peak_bytes(self, copies: Sequence[TimedCopy]) -> float:
        """The most that the device holds of saved tensors and workspace together."""
        return max(held_bytes(self._changes, moved(copies)))

    def host_bytes(self, copies: Sequence[TimedCopy]) -> float:
        """The most that the device has on its host at once."""
        return max(held_bytes([0.0] * len(self._changes), moved(copies), Memory.HOST))

    def most_that_the_link_carries(self) -> int:
        """The number of steps to offload if everything should be: all, or the number with the lowest peak."""
        chosen = self.chosen(self.shares(STEPS))
        kept = _kept(self.copies(chosen))
        if len(kept) == sum(long_enough(self.clock, stay) for stay in chosen.stays) and self._in_time(kept):
            return STEPS
        best: tuple[float, int] = (INFINITY, 0)
        for step in range(0, STEPS + 1, 2 * STEPS // TRIED):
            kept = self._copies_of(step)
            if self._in_time(kept):
                best = min(best, (self.peak_bytes(kept), -step))
        return -best[1]

    def fewest_within(self, limit: float) -> int:
        """The fewest steps with which the device holds at most ``limit``; else the number with the lowest peak found.

        Numbers of steps that exceed the host's memory are skipped.
        """
        peak, found = self._peak, self._peaks
        if peak(0) <= limit:
            return 0
        # To offload more than the link carries may result in a higher peak.
        tried = (STEPS, *range(STEPS // TRIED, STEPS, STEPS // TRIED))
        high: int | None = next((step for step in tried if peak(step) <= limit), None)
        if high is None:
            lowest: tuple[float, int] = min((found[step], step) for step in (0, *tried))
            return lowest[1]
        low = 0 if high == STEPS else high - STEPS // TRIED
        while high - low > 1:
            middle = (low + high) // 2
            if peak(middle) <= limit:
                high = middle
            else:
                low = middle
        return high

    def peak_within(self, limit: float) -> float:
        """The most that the device holds with :meth:`fewest_within`."""
        return self._peak(self.fewest_within(limit))

    def _peak(self, step: int) -> float:
        """The most that the device holds with a number of steps; infinite where its host has too little memory."""
        if step not in self._peaks:
            copies = self._copies_of(step)
            fits = self.host_bytes(copies) <= self._host_limit
            self._peaks[step] = self.peak_bytes(copies) if fits else INFINITY
        return self._peaks[step]

    def _copies_of(self, step: int) -> list[TimedCopy]:
        return _kept(self.copies(self.chosen(self.shares(step))))

    def _in_time(self, copies: Sequence[TimedCopy]) -> bool:
        """Whether copies delay the device little."""
        end = self.clock.ends[-1] if self.clock.ends else 0.0
        return waits_s(self.clock, copies, self._queues) <= WAIT_SHARE * end


def _kept(copies: Sequence[TimedCopy | None]) -> list[TimedCopy]:
    return [copy for copy in copies if copy is not None]


def _divided(storages: Sequence[Storage], share: float) -> tuple[tuple[Storage, ...], float]:
    """The storages that a stage offloads for a share of its bytes, and the share of microbatches that offload them.

    Args:
        storages: the largest first.
        share: above 0.
    """
    total = sum(storage.bytes for storage in storages)
    wanted, left = share * total * (1 + 1e-9), share * total * (1 + 1e-9)
    picked = []
    for storage in storages:
        if storage.bytes <= left:
            left -= storage.bytes
            picked.append(storage)
    if left > COARSE * total:
        return tuple(storages), min(wanted / total, 1.0)
    return tuple(picked), 1.0


def _stays(order: Sequence[Action]) -> dict[tuple[int, int], tuple[int, int]]:
    """Positions of F and of its B or I, by stage and microbatch, in order of F."""
    forward: dict[tuple[int, int], int] = {}
    reader: dict[tuple[int, int], int] = {}
    for position, action in enumerate(order):
        assert action.microbatch is not None
        if action.kind is Kind.F:
            forward[action.stage, action.microbatch] = position
        elif action.kind is not Kind.W:
            reader[action.stage, action.microbatch] = position
    return {key: (position, reader[key]) for key, position in forward.items() if key in reader}


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
    times: tuple[Times, Times]
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
