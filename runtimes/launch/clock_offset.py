"""The offset of this process's clock from that of rank 0, so that traces of several hosts have one time axis.

The monotonic clocks of two hosts begin at different times. Rank 0 exchanges messages with every other rank::

    rank 0      sent ─────────────▶ ┐            ┌─▶ received
    rank r                          └─▶ read ────┘                offset = read − (sent + received) / 2

The reading is between ``sent`` and ``received`` on the clock of rank 0, so the offset is wrong by half of the round
trip at most. The round with the shortest trip counts (D. L. Mills, "Internet time synchronization", 1991, section 4).
Clocks also run at different speeds, by some microseconds in a second, so each trace has its own measurement.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 16
"""Exchanges with each rank."""


def offset_of(rounds: Sequence[tuple[int, int, int]]) -> int:
    """The offset of another clock, in the unit of the readings.

    Args:
        rounds: (sent, read, received); the second by the other clock.

    Returns:
        The offset by the round with the shortest trip; 0 if it is within the error of the measurement, as in one host.
    """
    sent, read, received = min(rounds, key=lambda each: each[2] - each[0])
    offset = read - (sent + received) // 2
    return offset if abs(offset) > (received - sent + 1) // 2 else 0


def clock_offset_ns() -> int:
    """Nanoseconds that ``time.perf_counter_ns`` is ahead of rank 0's; all ranks of the job call it together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world: Any = dist.group.WORLD
    types = {device.type for device in world._device_types}
    on_host = "cpu" in types
    where = torch.device("cpu") if on_host else torch.device(types.pop(), torch.accelerator.current_device_index())
    offsets = torch.zeros(size, dtype=torch.int64, device=where)
    reading = torch.zeros(1, dtype=torch.int64, device=where)
    for other in range(1, size):
        if rank == 0:
            offsets[other] = offset_of([_exchange(other, reading) for _ in range(ROUNDS)])
        elif rank == other:
            for _ in range(ROUNDS):
                dist.recv(reading, 0)
                reading.cpu()  # waits for a message to a GPU
                dist.send(reading.fill_(time.perf_counter_ns()), 0)
    dist.broadcast(offsets, 0)
    return int(offsets[rank])


def _exchange(other: int, reading: torch.Tensor) -> tuple[int, int, int]:
    sent = time.perf_counter_ns()
    dist.send(reading, other)
    dist.recv(reading, other)
    return sent, int(reading), time.perf_counter_ns()
