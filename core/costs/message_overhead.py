"""Time that a device spends on sending or receiving a message: the overhead *o* of LogP, by size.

A device does nothing else while it sends a message or prepares to receive one: Culler et al., "LogP: towards a
realistic model of parallel computation" (PPoPP 1993), section 3. It is time of the device, not of the link.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy
from attrs import evolve, frozen

from .costs import StageCosts, StageEdge


class MessageCosts(Protocol):
    """Time that a message takes its sender and its receiver."""

    def send_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its sender."""

    def receive_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its receiver."""


@frozen
class MessageLine:
    """Equal times at both ends, linear in the size. The search for cuts uses it.

    Args:
        least_s: seconds of a message of 0 bytes.
        s_per_byte: additional seconds for each byte.
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
"""Messages that take no time of the sender and the receiver, such as those of copy engines."""


@frozen
class MessageTimes:
    """Times of one message, at its sender and at its receiver.

    Args:
        send, receive: bytes → seconds, for some sizes. Times are linear between sizes, and constant outside them.
    """

    send: Mapping[int, float]
    receive: Mapping[int, float]

    def send_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its sender."""
        return _between(self.send, size)

    def receive_s(self, size: int) -> float:
        """Seconds that a message of ``size`` bytes takes its receiver."""
        return _between(self.receive, size)


def shortest(seen: Sequence[MessageTimes]) -> MessageTimes:
    """The shortest measured times of each size."""
    return MessageTimes(*(_least([getattr(each, end) for each in seen]) for end in ("send", "receive")))


def with_message_times(
    costs: Sequence[StageCosts], placement: Sequence[int], edges: Iterable[StageEdge], times: MessageCosts
) -> tuple[StageCosts, ...]:
    """Costs of stages including the time of their messages to and from other devices.

    Outputs are added to F, gradients to B and to I. Messages within a device take no time.

    Args:
        costs: costs of the stages' programs, without messages.
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
            forward_s=cost.forward_s + forward_messages_s,
            recompute_s=cost.second_forward_s,
            backward_s=cost.full_backward_s + backward_messages_s,
            backward_input_s=cost.backward_input_s + backward_messages_s,
        )
        for cost, forward_messages_s, backward_messages_s in zip(costs, forward, back, strict=True)
    )


def _between(known: Mapping[int, float], size: int) -> float:
    sizes = sorted(known)
    return float(numpy.interp(size, sizes, [known[s] for s in sizes])) if sizes else 0.0


def _least(seen: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {size: min(each[size] for each in seen if size in each) for size in sorted(set().union(*seen))}
