"""What messages cost the devices at their two ends: the overhead *o* of LogP, by size.

A device that hands a message over, or makes room for one, does nothing else meanwhile: Culler et al., "LogP: towards a
realistic model of parallel computation" (PPoPP 1993), section 3. It is time of the device, not of the link.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy
from attrs import evolve, frozen

from .costs import StageCosts, StageEdge


class MessageCosts(Protocol):
    """What a message costs the devices at its ends."""

    def send_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its sender."""

    def receive_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its receiver."""


@frozen
class MessageLine:
    """The same at both ends, and linear in the size: what a search for cuts counts with.

    Args:
        least_s: seconds of a message of no bytes.
        s_per_byte: further seconds of each byte.
    """

    least_s: float = 0.0
    s_per_byte: float = 0.0

    def send_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its sender."""
        return self.least_s + self.s_per_byte * size

    def receive_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its receiver."""
        return self.send_s(size)


FREE = MessageLine()
"""Messages that cost their ends nothing, as copy engines carry them."""


@frozen
class MessageTimes:
    """Times of one message, at its sender and at its receiver.

    Args:
        send, receive: bytes → seconds, for some sizes. Between two of them time is linear, and beyond them constant.
    """

    send: Mapping[int, float]
    receive: Mapping[int, float]

    def send_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its sender."""
        return _between(self.send, size)

    def receive_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its receiver."""
        return _between(self.receive, size)


def typical(seen: Sequence[MessageTimes], quantile: float) -> MessageTimes:
    """A quantile, between 0 and 1, over what was seen of each size."""
    return MessageTimes(_quantiles([s.send for s in seen], quantile), _quantiles([s.receive for s in seen], quantile))


def with_message_times(
    costs: Sequence[StageCosts], placement: Sequence[int], edges: Iterable[StageEdge], times: MessageCosts
) -> tuple[StageCosts, ...]:
    """Costs of stages with what their messages to and from other devices take.

    Outputs belong to F, gradients to B and to I. What travels within a device costs nothing.

    Args:
        costs: of the stages' programs alone.
        placement: device of every stage.
        edges: what the stages send each other.
        times: of a message.
    """
    forward, back = [0.0] * len(costs), [0.0] * len(costs)
    for edge in edges:
        if placement[edge.src] == placement[edge.dst]:
            continue
        forward[edge.src] += times.send_s(edge.bytes)
        forward[edge.dst] += times.receive_s(edge.bytes)
        if edge.gradient_bytes:
            back[edge.dst] += times.send_s(edge.gradient_bytes)
            back[edge.src] += times.receive_s(edge.gradient_bytes)
    return tuple(
        evolve(
            cost,
            forward_s=cost.forward_s + ahead,
            recompute_s=cost.second_forward_s,
            backward_s=cost.full_backward_s + behind,
            backward_input_s=cost.backward_input_s + behind,
        )
        for cost, ahead, behind in zip(costs, forward, back, strict=True)
    )


def _between(known: Mapping[int, float], size: int) -> float:
    sizes = sorted(known)
    return float(numpy.interp(size, sizes, [known[s] for s in sizes])) if sizes else 0.0


def _quantiles(seen: Sequence[Mapping[int, float]], quantile: float) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for each in seen:
        for size, seconds in each.items():
            values.setdefault(size, []).append(seconds)
    return {size: float(numpy.quantile(found, quantile)) for size, found in sorted(values.items())}
