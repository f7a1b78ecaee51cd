"""The latest times of compute orders: when every action may start at the latest without any device ending later.

Delaying all actions to these times at once is possible: it is the longest path read from the end.
"""

from collections.abc import Sequence

from ..actions import BACKWARD_KINDS, Action, Kind
from ..costs.costs import StageCosts, StageEdge
from .reference import Evaluation, HopDelay, hop_delay

Times = tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]
"""Per device the starts and the ends of its actions."""

_Key = tuple[bool, int, int | None]
"""(whether it is an F, stage, microbatch) of an F, B or I: what other actions read."""


def latest_times(
    device_actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    costs: Sequence[StageCosts],
    result: Evaluation,
    *,
    edges: Sequence[StageEdge],
    hop_s: HopDelay = 0.0,
    recompute: Sequence[int] = (),
) -> Times:
    """The latest times; arguments as in ``evaluate``, with its result for these orders.

    The start of an action that recomputes first is that of its B or I, as in ``evaluate``.
    """
    forward_to: list[list[tuple[int, float]]] = [[] for _ in costs]
    gradient_to: list[list[tuple[int, float]]] = [[] for _ in costs]
    for edge in edges:
        forward_to[edge.src].append((edge.dst, hop_delay(hop_s, placement[edge.src], placement[edge.dst], edge.bytes)))
        if edge.gradient_bytes > 0:
            delay = hop_delay(hop_s, placement[edge.dst], placement[edge.src], edge.gradient_bytes)
            gradient_to[edge.dst].append((edge.src, delay))
    latest: dict[_Key, float] = {}  # start of F, B and I
    starts = [list(row) for row in result.starts]
    ends = [list(row) for row in result.ends]
    free = [row[-1] if row else 0.0 for row in ends]  # the latest end of the next action, read from the end
    left = [len(order) for order in device_actions]
    progressed = True
    while progressed:
        progressed = False
        for device, order in enumerate(device_actions):
            while left[device]:
                action = order[left[device] - 1]
                end = free[device]
                if action.kind is not Kind.W:
                    targets = (forward_to if action.kind is Kind.F else gradient_to)[action.stage]
                    keys = [((action.kind is Kind.F, stage, action.microbatch), delay) for stage, delay in targets]
                    if any(key not in latest for key, _ in keys):
                        break
                    end = min([end, *(latest[key] - delay for key, delay in keys)])
                left[device] -= 1
                at, progressed = left[device], True
                starts[device][at], ends[device][at] = end - (ends[device][at] - starts[device][at]), end
                free[device] = starts[device][at]
                if action.kind is not Kind.W:
                    latest[action.kind is Kind.F, action.stage, action.microbatch] = starts[device][at]
                if action.stage in recompute and action.kind in BACKWARD_KINDS:
                    free[device] -= costs[action.stage].second_forward_s
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))
