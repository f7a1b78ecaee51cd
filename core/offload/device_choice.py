"""What one device can offload, in steps between nothing and everything, and what it then holds.

A device offloads a share of the bytes that its stages save: all of the stages whose saved tensors are held longest,
part of the next one, and nothing of the others. Of that part, the largest storages are offloaded. If the storages are
too coarse for the part, all storages of evenly spread microbatches are. Microbatches whose tensors are not held long
enough are never copied (see :mod:`.copy_times`).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import floor
from statistics import median

from attrs import frozen

from ..actions import Action, Kind
from ..costs.costs import StageCosts
from ..evaluate.coding import INFINITY
from ..evaluate.host_queue import TimedCopy, bytes_off_device
from ..plan.memory import held_bytes
from ..plan.offload import Storage
from .copy_times import Clock, Stay, long_enough, plan_copies, waits_s
from .host_links import HostLink

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
        held = list(held_bytes(order, costs, recompute))
        self._running = [
            now + costs[action.stage].workspace_bytes for action, (now, _) in zip(order, held, strict=True)
        ]
        self._after = [after for _, after in held]
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
        off_device = bytes_off_device(copies, len(self.order))
        running = (held - gone for held, (gone, _) in zip(self._running, off_device, strict=True))
        after = (held - gone for held, (_, gone) in zip(self._after, off_device, strict=True))
        return max(max(running, default=0.0), max(after, default=0.0))

    def host_bytes(self, copies: Sequence[TimedCopy]) -> float:
        """The most that the device has on its host at once."""
        changes = [0.0] * len(self.order)
        for copy in copies:
            changes[copy.forward] += copy.bytes
            changes[copy.reader] -= copy.bytes
        return max(accumulate(changes), default=0.0)

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
