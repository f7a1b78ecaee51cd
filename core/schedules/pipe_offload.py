"""PO-H and PO-F: GIS-H with offload (PipeOffload, arXiv 2503.01328, section 5).

GIS runs a group of microbatches through one stage before the next, so a device's copies to the host come in bursts. The
same lifespans with *uniform repeating* spread them evenly: every microbatch runs the same building block, one pass of
every stage in each period. Of v stages per device, in slots of one pass, for d devices::

    F of chunk c on device i    3·l·c + (hops from device 0 to i, 1 or 2 slots each)
    I                           3·k·(v − 1 − c) + (hops from the last device to i, 2 or 1 slots each), after all F
    W                           directly after its I

l + k = d (a few more where v and d make passes share a slot), as in groups of ⌈d/2⌉: chunk c holds about
d·(v − c)/v microbatches. PO-F offloads all stages: the saved tensors of about four passes remain, for any number of
devices. PO-H offloads the half of the chunks that holds most: (v + 2)/(8v) of 1F1B's saved tensors remain.
"""

from collections.abc import Iterator
from math import gcd

from ..actions import Action, Kind
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement

PASSES = 3
"""Slots of F, I and W of one stage."""


def po_f(problem: ScheduleProblem) -> Schedule:
    """Uniformly repeated GIS-H; all saved tensors are offloaded, as far as the link and the times between allow it."""
    stages = range(problem.stages)
    return _build(problem, f"po-f(chunks={problem.chunks})", tuple((stage, 1.0) for stage in stages))


def po_h(problem: ScheduleProblem) -> Schedule:
    """Uniformly repeated GIS-H; the half of the saved tensors that is held longest is offloaded."""
    share = [min(max(problem.chunks / 2 - chunk, 0.0), 1.0) for chunk in range(problem.chunks)]
    offload = ((stage, share[stage // problem.devices]) for stage in range(problem.stages))
    return _build(problem, f"po-h(chunks={problem.chunks})", tuple(each for each in offload if each[1] > 0))


def _build(problem: ScheduleProblem, name: str, offload: tuple[tuple[int, float], ...]) -> Schedule:
    devices, chunks, count = problem.devices, problem.chunks, problem.microbatches
    forward, backward = block(devices, chunks)
    period = PASSES * chunks
    rows = []
    for device in range(devices):
        due = sorted(
            (slot + period * microbatch, Action(stage, kind, microbatch))
            for stage in range(device, devices * chunks, devices)
            for kind, slot in (
                (Kind.F, forward[stage]), (Kind.I, backward[stage]), (Kind.W, backward[stage] + 1)
            )
            for microbatch in range(count)
        )  # fmt: skip
        rows.append(tuple(action for _, action in due))
    return Schedule(name, looped_placement(devices, chunks), count, tuple(rows), offload)


def block(devices: int, chunks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slots of F and of I of every stage for the first microbatch."""
    there, back, hops = next(_rounds(devices, chunks))
    out = [0]
    for hop in hops:
        out.append(out[-1] + hop)
    home = [0]
    for hop in reversed(hops):
        home.append(home[-1] + PASSES - hop)
    home.reverse()
    forward = tuple(PASSES * there * chunk + slot for chunk in range(chunks) for slot in out)
    turn = forward[-1] + 1
    backward = tuple(turn + PASSES * back * (chunks - 1 - chunk) + slot for chunk in range(chunks) for slot in home)
    return forward, backward


def _rounds(devices: int, chunks: int) -> Iterator[tuple[int, int, list[int]]]:
    """Periods of one pass around the devices forward and backward, and the slots of each hop forward.

    The smallest sum comes first. Both must be coprime to the chunks: then the passes of a device's stages never share a
    slot.
    """
    hops = devices - 1
    total = max(devices, 2)
    while True:
        for there in sorted(range(1, total), key=lambda there: (abs(2 * there - total), there)):
            back = total - there
            # Bounds of the slots of all hops forward: the hop to the next chunk takes at least one more, forward and
            # backward.
            least = max(hops, PASSES * hops - (PASSES * back - 1))
            most = min(2 * hops, PASSES * there - 1)
            if least <= most and gcd(there, chunks) == gcd(back, chunks) == 1:
                long = least - hops
                yield there, back, [1 + ((hop + 1) * long // hops > hop * long // hops) for hop in range(hops)]
        total += 1


PO_H = ScheduleFamily(
    "po-h", po_h, "gis-h repeated uniformly, the longest half of the saved tensors offloaded (PipeOffload)",
    split_backward=True, usual_chunks=2, offloads=True,
)  # fmt: skip
PO_F = ScheduleFamily(
    "po-f", po_f, "gis-h repeated uniformly, all saved tensors offloaded (PipeOffload)", split_backward=True,
    usual_chunks=2, offloads=True,
)  # fmt: skip
