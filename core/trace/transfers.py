"""Messages, predicted and measured.

Most transports do not report when a transfer ran. A measured message then ends when its reader has waited for it, and
its duration includes that wait, so it is not compared with the time on the link. Start and end are always compared.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from attrs import frozen

from ..actions import COMM_KINDS, Kind, known_kinds
from .durations import ActionError, ActionOnDevice, KindSummary, Pair, kind_summary


@frozen
class Offset:
    """How far predicted times are from the measured ones, in seconds.

    Args:
        median_s: median of the absolute differences.
        worst_s: predicted − measured, of the message where it is largest.
        worst: that message.
    """

    median_s: float
    worst_s: float
    worst: ActionOnDevice


@frozen
class TransferSummary:
    """All messages of one kind.

    Args:
        kind: the kind.
        count: number of messages in both traces.
        start, end: how far predicted starts and ends are from measured ones.
        moved: durations of the transfers that the transport reported; None if it reported none.
    """

    kind: Kind
    count: int
    start: Offset
    end: Offset
    moved: KindSummary | None


def transfer_summaries(actions: Sequence[ActionError]) -> tuple[TransferSummary, ...]:
    """One summary for each kind of message, in the order of ``Kind``."""
    groups: dict[Kind, list[ActionError]] = defaultdict(list)
    for item in actions:
        if item.action.kind in COMM_KINDS:
            groups[item.action.kind].append(item)
    return tuple(_summary(kind, groups[kind]) for kind in known_kinds() if kind in groups)


def _summary(kind: Kind, actions: Sequence[ActionError]) -> TransferSummary:
    reported = [each for each in actions if each.reported]
    return TransferSummary(
        kind,
        len(actions),
        _offset([(each, each.start) for each in actions]),
        _offset([(each, each.end) for each in actions]),
        kind_summary(kind, reported) if reported else None,
    )


def _offset(times: Sequence[tuple[ActionError, Pair]]) -> Offset:
    differences = [time.predicted - time.measured for _, time in times]
    worst = max(range(len(times)), key=lambda i: abs(differences[i]))
    action = times[worst][0]
    median = statistics.median(map(abs, differences))
    return Offset(median, differences[worst], ActionOnDevice(action.device, action.action))
