"""What is to be seen over time on one device: memory, and the three phases of a step."""

from collections.abc import Sequence

from attrs import frozen

from ...actions import Action, Kind
from ...costs.costs import StageCosts
from ...evaluate.memory import held_bytes
from ...schedules.scored import Scored, costs_of

FORWARD, BACKWARD = frozenset({Kind.F}), frozenset({Kind.B, Kind.I, Kind.W})


def memory_curve(
    actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float], costs: Sequence[StageCosts]
) -> list[tuple[float, float]]:
    """Saved tensors that a device holds from each moment on: (time, held), times ascending, one entry for a moment.

    Args:
        actions: the device's F, I, W and B in order.
        starts, ends: of each of them.
        costs: per stage.
    """
    curve = [(0.0, 0.0)]
    for start, end, (running, after) in zip(starts, ends, held_bytes(actions, costs), strict=True):
        for moment, held in ((start, running), (end, after)):
            if curve[-1][0] == moment:
                curve[-1] = (moment, held)
            elif curve[-1][1] != held:
                curve.append((moment, held))
    return curve


def curves_of(scored: Scored) -> list[list[tuple[float, float]]]:
    """Per device (time, held); memory in one device's saved tensors for one microbatch."""
    result, costs, chunks = scored.result, costs_of(scored.problem), scored.problem.chunks
    return [
        [(time, held / chunks) for time, held in memory_curve(actions, starts, ends, costs)]
        for actions, starts, ends in zip(scored.schedule.device_actions, result.starts, result.ends, strict=True)
    ]


@frozen
class Phases:
    """Moments that divide a device's step.

    Args:
        start, end: of its first and of its last action.
        steady: its first backward starts; until then it warms up.
        cooling: its last forward has ended; from then on it cools down.
    """

    start: float
    steady: float
    cooling: float
    end: float


def phases(actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float]) -> Phases:
    """The phases of a device with at least one forward and one backward."""
    backward = min(start for action, start in zip(actions, starts, strict=True) if action.kind in BACKWARD)
    forward = max(end for action, end in zip(actions, ends, strict=True) if action.kind in FORWARD)
    return Phases(starts[0], backward, max(forward, backward), ends[-1])
