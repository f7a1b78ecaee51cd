"""Delays of flows by contention, and the full links that caused them.

A flow at rate r whose rate without contention is R loses ``1 − r/R`` of every second, to the full link that limits it.
Later messages of its queue may start later by that: the delay of a message is the time when it drained minus the time
when it would have drained if its queue had the links alone and its messages were ready at the same times.
"""

from collections.abc import Iterable, Mapping, Sequence

from .network.flow_times import Direction, FlowTimes

Delays = Mapping[Direction, float]
"""Seconds by directed link."""


def queue_delays(flows: Sequence[FlowTimes], ready_s: Sequence[float]) -> list[Delays]:
    """The delay of every flow of an in-order queue, by the full links that caused it.

    Args:
        flows: in order; each starts when the previous one has drained.
        ready_s: when each could have started in an empty queue.
    """
    if all(flow.pieces is None for flow in flows):
        return [{}] * len(flows)
    delays: list[Delays] = []
    drained_alone_s = 0.0
    before: Delays = {}
    for flow, ready in zip(flows, ready_s, strict=True):
        start_alone_s = max(ready, drained_alone_s)
        drained_alone_s = start_alone_s + flow.alone_s
        held_up_s = flow.start_s - start_alone_s
        before = scaled(before, held_up_s)
        if flow.pieces is not None:
            before = added((before, lost(flow)))
        delays.append(before)
    return delays


def lost(flow: FlowTimes) -> Delays:
    """The time that a flow itself loses, by full link."""
    result: dict[Direction, float] = {}
    for piece in flow.pieces or ():
        if piece.held_by is not None:
            seconds = (piece.end_s - piece.start_s) * (1 - piece.rate / flow.bytes_per_s)
            result[piece.held_by] = result.get(piece.held_by, 0.0) + seconds
    return result


def scaled(delays: Delays, seconds: float) -> Delays:
    """The delays, scaled down so that their sum is at most ``seconds``."""
    total = sum(delays.values())
    if seconds <= 0 or not total:
        return {}
    if seconds >= total:
        return delays
    return {link: part * seconds / total for link, part in delays.items()}


def added(many: Iterable[Delays]) -> dict[Direction, float]:
    """The sum by link."""
    total: dict[Direction, float] = {}
    for delays in many:
        for link, seconds in delays.items():
            total[link] = total.get(link, 0.0) + seconds
    return total
