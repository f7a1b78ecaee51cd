"""Why a device idles.

Between two of its operations it waits for the message that arrives last. Until that message was sent, another device's
compute is what it waits for; from then on, communication (a rendezvous and the queue included)::

    device 0   ──── 0F3 ────┐ sent            arrived
    device 1   1F2 ─┤ dependency │ communication ├─ 1F3 ──
"""

from collections.abc import Mapping, Sequence

from ..core.actions import Kind
from ..core.messages import Exchange
from .times import ReductionTimes

WARM_UP = "warm-up"
DEPENDENCY = "dependency"
COMMUNICATION = "communication"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"
COOL_DOWN = "cool-down"
CAUSES = {
    WARM_UP: "before its first action",
    DEPENDENCY: "another device still computes what it reads",
    COMMUNICATION: "what it reads is sent, and not yet there",
    REDUCTION: "gradients are summed, over replicas or of a tied weight",
    OPTIMIZER: "its optimizer step waits for other stages",
    COOL_DOWN: "behind its last action, others still work",
}

OperationTimes = Sequence[tuple[list[float], list[float]]]
TransferTimes = Mapping[tuple[int, int], tuple[list[float], list[float]]]


def device_bubbles(
    exchange: Exchange,
    operation_times: OperationTimes,
    transfer_times: TransferTimes,
    reductions: Sequence[ReductionTimes],
    step_s: float,
) -> tuple[dict[str, float], ...]:
    """Per device idle seconds by cause, all of ``CAUSES`` in order; with the seconds of its operations they add up to
    the step.

    Args:
        exchange: the lowered plan.
        operation_times: per device the starts and the ends of its operations.
        transfer_times: per ordered pair of devices the starts and the arrivals of its messages.
        reductions: of tied weights, and of gradients over replicas.
        step_s: time of the step.
    """
    sent = _last_sent(exchange, operation_times, transfer_times)
    reduced_s: dict[tuple[int, int], float] = {}
    for reduction in reductions:
        key = reduction.device, reduction.stage
        reduced_s[key] = max(reduced_s.get(key, 0.0), reduction.end_s)
    result = []
    for device, actions in enumerate(exchange.operations):
        idle = dict.fromkeys(CAUSES, 0.0)
        starts, ends = operation_times[device]
        last_end = 0.0
        for position, action in enumerate(actions):
            gap = starts[position] - last_end
            if gap > 0:
                if position == 0:
                    idle[WARM_UP] += gap
                elif action.kind is Kind.STEP:
                    waited_s = min(max(reduced_s.get((device, action.stage), last_end) - last_end, 0.0), gap)
                    idle[REDUCTION] += waited_s
                    idle[OPTIMIZER] += gap - waited_s
                else:
                    sent_s = min(max(sent.get((device, position), last_end), last_end), starts[position])
                    idle[DEPENDENCY] += sent_s - last_end
                    idle[COMMUNICATION] += starts[position] - sent_s
            last_end = ends[position]
        idle[COOL_DOWN] = step_s - last_end
        result.append(idle)
    return tuple(result)


def _last_sent(
    exchange: Exchange, operation_times: OperationTimes, transfer_times: TransferTimes
) -> dict[tuple[int, int], float]:
    """For (device, operation) when the message was sent that arrived last for it."""
    latest: dict[tuple[int, int], tuple[float, float]] = {}
    for (src, dst), messages in exchange.queues.items():
        ends = operation_times[src][1]
        for message, arrived_s in zip(messages, transfer_times[src, dst][1], strict=True):
            key = dst, message.reader
            if key not in latest or arrived_s > latest[key][0]:
                latest[key] = arrived_s, ends[message.issued]
    return {key: sent_s for key, (_, sent_s) in latest.items()}
