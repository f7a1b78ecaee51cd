"""Whether the plan fits the memory of every device; if not, the error says what does not fit.

State, saved tensors and the workspace of the running action must fit: the peak that plans predict. A device that
exceeds its limit only with communication buffers gets a warning. If a search finds no plan that fits, its error is in
`core/search/suggestions/infeasible`, and the changes that help in `changes` next to it.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ...actions import Action, Kind
from ...costs.costs import StageCosts
from ...errors import InfeasibleError
from ..plan import Plan
from ..residency import Timeline


def check_memory(
    plan: Plan, costs: Sequence[StageCosts], timelines: Sequence[Timeline], limits: Sequence[float]
) -> list[str]:
    """Compare each device's peak with its limit, in bytes.

    Returns:
        Warnings.

    Raises:
        InfeasibleError: a device is over its limit; the message names the device, the action, the excess and a fix.
    """
    warnings = []
    for device, (timeline, limit) in enumerate(zip(timelines, limits, strict=True)):
        state = sum(timeline.state)
        working = timeline.working
        worst = int(working.argmax())
        over = float(working[worst]) - limit
        if over > 0:
            position = int(timeline.operations[worst])
            at = f"at {timeline.actions[position]}" if timeline.actions else "before anything runs"
            raise InfeasibleError(
                f"device {device} holds {working[worst]:.0f} bytes {at} and has {limit:.0f}: {over:.0f} too many; "
                + _smallest_change(plan, timeline.actions[: position + 1], costs, over, state - limit)
            )
        if timeline.peak_bytes > limit:
            warnings.append(
                f"device {device} holds {timeline.peak_bytes:.0f} bytes at {timeline.peak_action} with its "
                f"communication buffers and has {limit:.0f}: {timeline.peak_bytes - limit:.0f} too many if "
                "all buffers are in use"
            )
    return warnings


def _smallest_change(
    plan: Plan, actions: Sequence[Action], costs: Sequence[StageCosts], over: float, state_over: float
) -> str:
    if state_over > 0:
        return (
            f"its parameters, gradients and optimizer state alone are {state_over:.0f} too many; move operators to "
            f"another device, or give the device {over:.0f} bytes more"
        )
    again = plan.memory.recompute
    each = {i: cost.input_bytes if i in again else cost.saved_bytes for i, cost in enumerate(costs)}
    held = _held(actions)
    most = max(held, key=lambda stage: (each[stage], -stage), default=None)
    change = f"give the device {over:.0f} bytes more"
    if most is None or not each[most]:
        return change
    keeps = [i for i in held if i not in again and i not in plan.offloaded_bytes]
    less = {i: (held[i] - 1) * (each[i] - costs[i].input_bytes) for i in keeps}
    best = max(less, key=lambda stage: (less[stage], -stage), default=None)
    if best is not None and less[best] >= over:
        change += (
            f", or recompute stage {best} (it keeps {costs[best].input_bytes:.0f} bytes of a microbatch then, and "
            f"saves {costs[best].saved_bytes:.0f} now)"
        )
    fewer = math.ceil(over / each[most])
    if fewer < held[most] and most not in plan.offloaded_bytes:
        return (
            f"{change}, or start {fewer} fewer of the {held[most]} microbatches that stage {most} holds then "
            f"({each[most]:.0f} bytes each)"
        )
    return f"{change}, or cut the batch into more microbatches (stage {most} saves {each[most]:.0f} bytes of each)"


def _held(actions: Sequence[Action]) -> Counter[int]:
    """Per stage the number of microbatches with saved tensors while the last of these actions runs."""
    held: Counter[int] = Counter(action.stage for action in actions if action.kind is Kind.F)
    held.subtract(action.stage for action in actions[:-1] if action.kind in (Kind.B, Kind.W))
    return +held
