"""Durations of actions, predicted and measured, and their errors by kind.

Errors are predicted − measured, relative ones divided by the measured value: above 0 the prediction was too high.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from attrs import frozen

from ..actions import Action, Kind, known_kinds


@frozen
class Pair:
    """A predicted and a measured value.

    Args:
        predicted, measured: in one unit.
        error: predicted ÷ measured − 1; None where the measured value is 0 and the predicted one is not.
    """

    predicted: float
    measured: float
    error: float | None


def pair(predicted: float, measured: float) -> Pair:
    """Two values with their relative error."""
    if measured == 0:
        return Pair(predicted, measured, 0.0 if predicted == 0 else None)
    return Pair(predicted, measured, predicted / measured - 1)


@frozen
class ActionError:
    """One action that both traces have. Times in seconds from the start of each step.

    Args:
        device, action: the action and its device.
        queue: name of its queue in the measured trace.
        start, end, duration: predicted and measured, in seconds.
        reported: whether the measured duration is one that the transport reported (``TraceEvent.reported``).
    """

    device: int
    action: Action
    queue: str
    start: Pair
    end: Pair
    duration: Pair
    reported: bool = False


@frozen
class ActionOnDevice:
    """An action and the device that ran it."""

    device: int
    action: Action


@frozen
class KindSummary:
    """Durations of all actions of one kind.

    Args:
        kind: the kind.
        count: number of actions in both traces.
        predicted_s, measured_s: sums, in seconds.
        bias: relative error of the sum; None if the measured sum is 0 and the predicted one is not.
        median_error, mean_error: of the actions' absolute relative errors; None if no action has one.
        worst_error: the relative error with the largest absolute value.
        worst: the action with that error.
        worst_off_s: predicted − measured of that action, in seconds.
    """

    kind: Kind
    count: int
    predicted_s: float
    measured_s: float
    bias: float | None
    median_error: float | None
    mean_error: float | None
    worst_error: float | None
    worst: ActionOnDevice | None
    worst_off_s: float | None = None


def kind_summaries(actions: Sequence[ActionError]) -> tuple[KindSummary, ...]:
    """One summary for each kind, in the order of ``Kind``."""
    groups: dict[Kind, list[ActionError]] = defaultdict(list)
    for item in actions:
        groups[item.action.kind].append(item)
    return tuple(kind_summary(kind, groups[kind]) for kind in known_kinds() if kind in groups)


def kind_summary(kind: Kind, actions: Sequence[ActionError]) -> KindSummary:
    """The durations of these actions, which are all of one kind."""
    total = pair(sum(a.duration.predicted for a in actions), sum(a.duration.measured for a in actions))
    errors = [(a.duration.error, a) for a in actions if a.duration.error is not None]
    sizes = [abs(error) for error, _ in errors]
    worst = max(errors, key=lambda item: abs(item[0]), default=None)
    return KindSummary(
        kind,
        len(actions),
        total.predicted,
        total.measured,
        total.error,
        statistics.median(sizes) if sizes else None,
        statistics.fmean(sizes) if sizes else None,
        worst[0] if worst else None,
        ActionOnDevice(worst[1].device, worst[1].action) if worst else None,
        worst[1].duration.predicted - worst[1].duration.measured if worst else None,
    )
