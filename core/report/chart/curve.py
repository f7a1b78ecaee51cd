"""The memory of one device over time."""

from collections.abc import Sequence

from ...actions import Action
from ...costs.costs import StageCosts
from ...plan.memory import held_bytes
from ...plan.memory_policy import TimedCopy
from ...schedules.scored import Scored, costs_of


def memory_curve(
    actions: Sequence[Action],
    starts: Sequence[float],
    ends: Sequence[float],
    costs: Sequence[StageCosts],
    copies: Sequence[TimedCopy] = (),
) -> list[tuple[float, float]]:
    """Saved tensors that a device holds from each time on: (time, held), times ascending and distinct.

    Args:
        actions: the device's F, I, W and B in order.
        starts, ends: of each of them.
        costs: per stage.
        copies: of the device to the host.
    """
    curve = [(0.0, 0.0)]
    held_by_action = held_bytes(actions, costs, copies=copies)
    for start, end, (running, after) in zip(starts, ends, held_by_action, strict=True):
        # A reload allocates before the next action frees offloaded tensors.
        before = curve[-1][1] if copies and curve[-1][0] == start else 0.0
        for moment, held in ((start, max(running, before)), (end, after)):
            if curve[-1][0] == moment:
                curve[-1] = (moment, held)
            elif curve[-1][1] != held:
                curve.append((moment, held))
    return curve


def curves_of(scored: Scored) -> list[list[tuple[float, float]]]:
    """Per device (time, held); memory in one device's saved tensors for one microbatch."""
    result, costs, chunks = scored.result, costs_of(scored.problem), scored.problem.chunks
    copies = scored.copies or [()] * len(result.starts)
    rows = zip(scored.schedule.device_actions, result.starts, result.ends, copies, strict=True)
    return [
        [(time, held / chunks) for time, held in memory_curve(actions, starts, ends, costs, own)]
        for actions, starts, ends, own in rows
    ]
