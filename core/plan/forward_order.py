"""The compute order of forwards without backwards, for evaluation.

Each device runs the forward of its latest stage whose inputs are available. So messages are read soon after they
arrive, and no device idles while it has a forward to run. The result is a fixed order::

    two devices, four stages in a V, three microbatches, one tick per forward
    device 0   0F0 0F1 0F2 3F0  .  3F1  .  3F2        stages 0 and 3
    device 1    .  1F0 2F0 1F1 2F1 1F2 2F2            stages 1 and 2

The order is recorded from a simulated run that completed, so it cannot deadlock.

`stage_by_stage` is the order for parameters that are whole for one stage of a device at a time: each stage runs all
microbatches before the next one of its device. It takes longer in a V, whose first device waits for the last.
"""

import heapq
from collections.abc import Iterable, Sequence

from ..actions import Action, Kind
from ..costs.costs import StageEdge


def forward_order(
    placement: Sequence[int],
    edges: Iterable[StageEdge],
    devices: int,
    microbatches: int,
    forward_s: Sequence[float] | None = None,
) -> tuple[tuple[Action, ...], ...]:
    """Per device its forwards, in order; those of a stage ascend by microbatch.

    Args:
        placement: device of every stage.
        edges: from stages to later ones.
        devices: how many there are.
        microbatches: how many.
        forward_s: time of each stage's F; equal by default. Messages take no time.
    """
    stages = len(placement)
    seconds = forward_s if forward_s is not None and all(time > 0 for time in forward_s) else [1.0] * stages
    sources: list[set[int]] = [set() for _ in placement]
    readers: list[list[int]] = [[] for _ in placement]
    for edge in edges:
        if edge.src not in sources[edge.dst]:
            sources[edge.dst].add(edge.src)
            readers[edge.src].append(edge.dst)
    missing = [[len(sources[stage])] * microbatches for stage in range(stages)]
    upcoming = [0] * stages
    orders: list[list[Action]] = [[] for _ in range(devices)]
    own = [[stage for stage in reversed(range(stages)) if placement[stage] == device] for device in range(devices)]
    running: list[tuple[float, int, int, int]] = []

    def starts(device: int, now_s: float) -> bool:
        """Start the next forward of a device; return whether there was one."""
        for stage in own[device]:
            microbatch = upcoming[stage]
            if microbatch < microbatches and not missing[stage][microbatch]:
                upcoming[stage] += 1
                orders[device].append(Action(stage, Kind.F, microbatch))
                heapq.heappush(running, (now_s + seconds[stage], device, stage, microbatch))
                return True
        return False

    idle = set(range(devices))
    now_s = 0.0
    while True:
        idle = {device for device in sorted(idle) if not starts(device, now_s)}
        if not running:
            return tuple(map(tuple, orders))
        now_s = running[0][0]
        while running and running[0][0] == now_s:
            _, device, stage, microbatch = heapq.heappop(running)
            idle.add(device)
            for reader in readers[stage]:
                missing[reader][microbatch] -= 1


def stage_by_stage(placement: Sequence[int], devices: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Per device all forwards of its first stage, then those of the next one; arguments as of `forward_order`.

    Each waits for earlier stages alone, also where replicas wait for each other before a stage, so it cannot deadlock.
    """
    orders: list[list[Action]] = [[] for _ in range(devices)]
    for stage, device in enumerate(placement):
        orders[device] += [Action(stage, Kind.F, microbatch) for microbatch in range(microbatches)]
    return tuple(map(tuple, orders))
