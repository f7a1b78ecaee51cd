"""Measures how much messages slow down the computation of the devices at their ends.

A transport that moves bytes with the processor takes the time from the computation: over gloo a message of 2 MiB makes
the program at each end 1 to 2 ms longer (two workers on two cores). The calls that send and receive show only a part of
it. So the same work is timed with and without messages, in turns.
"""

import math
import statistics
from collections.abc import Mapping

import torch

from ...backends.contract import Backend
from ...core.costs.message_overhead import FREE, MessageLine
from ..devices.compute import finished_s
from ..launch.team import Team

SIZES = (1 << 16, 1 << 21)
"""Bytes of the messages that the line is fitted to."""
ROUNDS = 5
"""Number of times that each is sent while the work runs, in turns with the work alone; the shortest times count."""
WORK_S = 0.003
"""Seconds of work while messages are sent: longer than what the larger message takes, and short enough that some of the
rounds run undisturbed on a busy machine."""
WIDTH = 256
"""Of the matrices that are multiplied as work."""


def measured_message_line(team: Team, where: Mapping[int, torch.device]) -> MessageLine:
    """The time that a message costs each of its ends on this machine, the same on every rank.

    It is zero on GPUs, whose copy engines move messages, and for one device.

    Args:
        team: the devices.
        where: device of this process → its torch device.
    """
    if team.size == 1 or any(device.type != "cpu" for device in where.values()):
        return FREE
    lines = [line for line in team.everywhere(lambda d: _line(team.backend(d))) if line is not None]
    return team.decide(
        lambda: MessageLine(
            statistics.median(line.least_s for line in lines), statistics.median(line.s_per_byte for line in lines)
        )
    )


def _line(backend: Backend) -> MessageLine | None:
    """The cost for this device of a message between an even device and the next one; None without a partner."""
    peer = backend.device ^ 1
    if peer >= backend.devices:
        return None
    small, large = SIZES
    first, second = (_seconds(backend, peer, size) for size in SIZES)
    slope = max(second - first, 0.0) / (large - small)
    return MessageLine(max(first - slope * small, 0.0), slope)


def _seconds(backend: Backend, peer: int, size: int) -> float:
    """Seconds that work takes longer while one message is sent and one received, for each of the two."""
    here = torch.device("cpu")
    message, answer = [torch.zeros(size // 4)], [torch.empty(size // 4)]
    matrix = torch.randn(WIDTH, WIDTH)
    products = _products(matrix)
    alone, with_messages = list[float](), list[float]()
    for _ in range(1 + ROUNDS):
        start = finished_s(here)
        _work(matrix, products)
        alone.append(finished_s(here) - start)
        start = finished_s(here)
        handles = [backend.receive(answer, peer), backend.send(message, peer)]
        _work(matrix, products)
        with_messages.append(finished_s(here) - start)
        for handle in handles:
            handle.wait()
    return max(min(with_messages[1:]) - min(alone[1:]), 0.0) / 2


def _products(matrix: torch.Tensor) -> int:
    """Number of products that take about ``WORK_S`` on this machine."""
    times = []
    for _ in range(5):
        start = finished_s(matrix.device)
        _work(matrix, 1)
        times.append(finished_s(matrix.device) - start)
    return math.ceil(WORK_S / max(statistics.median(times), 1e-6))


def _work(matrix: torch.Tensor, products: int) -> None:
    for _ in range(products):
        torch.mm(matrix, matrix)
