"""How much later flows drained because others shared their links, and which links were full.

A flow at rate r that alone would have rate R loses ``1 − r/R`` of every second, to the full link that holds it. What
stands behind it in its queue may start later by that, and so on: the delay is when something drained, less when it
would have drained had its queue been alone with the links, its messages being ready at the very same moments.
"""

from collections.abc import Iterable, Mapping, Sequence

from .times import Direction, FlowTimes

Delays = Mapping[Direction, float]
"""Seconds by directed link."""


def queue_delays(flows: Sequence[FlowTimes], ready_s: Sequence[float]) -> list[Delays]:
    """Of every flow of an in-order queue, its delay, by the full links that caused it.

    Args:
        flows: in order, one starting when the one in front of it has drained.
        ready_s: when each could have started, had nothing been in front of it.
    """
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
    """What a flow itself loses on full links."""
    result: dict[Direction, float] = {}
    for piece in flow.pieces or ():
        if piece.held_by is not None:
            seconds = (piece.end_s - piece.start_s) * (1 - piece.rate / flow.bytes_per_s)
            result[piece.held_by] = result.get(piece.held_by, 0.0) + seconds
    return result


def scaled(delays: Delays, seconds: float) -> Delays:
    """Delays in the same proportion that add up to at most ``seconds``."""
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
