"""Time that a device spends on sending or receiving a message: the overhead *o* of LogP, by size.

A device does nothing else while it sends a message or prepares to receive one: Culler et al., "LogP: towards a
realistic model of parallel computation" (PPoPP 1993), section 3. It is time of the device, not of the link.
"""

from collections.abc import Iterable, Sequence

from attrs import evolve, frozen

from .costs import StageCosts, StageEdge


@frozen
class MessageLine:
    """Equal times at both ends, linear in the size.

    Args:
        least_s: seconds of a message of 0 bytes.
        s_per_byte: additional seconds for each byte.
    """

    least_s: float = 0.0
    s_per_byte: float = 0.0


FREE = MessageLine()
"""Messages that take no time of the sender and the receiver, such as those of copy engines."""


def with_message_times(
    costs: Sequence[StageCosts], placement: Sequence[int], edges: Iterable[StageEdge], message: MessageLine
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
        for end in (edge.src, edge.dst):
            forward[end] += message.least_s + message.s_per_byte * edge.bytes
            if edge.gradient_bytes:
                back[end] += message.least_s + message.s_per_byte * edge.gradient_bytes
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
