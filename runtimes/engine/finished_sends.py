"""Finds the sends that must have ended when a receive has arrived, so that their tensors can be freed."""

from collections.abc import Sequence

from ...core.actions import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from ...core.plan.plan import Plan
from .messages import MessageKey


def finished_sends(
    plan: Plan, lowered: Sequence[Sequence[Action]], device: int
) -> dict[Action, tuple[MessageKey, ...]]:
    """For receives of one device, the messages it sent whose transfers have ended once the receive has arrived.

    A send has ended when the peer has run the action that reads the message. The next message from that peer proves it.
    So no handle is polled: gloo's handles can only be waited for.

    Args:
        plan: the plan.
        lowered: the lowered actions of all devices.
        device: the device that sends.
    """
    finished: dict[Action, tuple[MessageKey, ...]] = {}
    placement = plan.placement
    for peer, actions in enumerate(lowered):
        if peer == device:
            continue
        read: list[MessageKey] = []
        arrived: dict[tuple[int, int | None, bool], list[MessageKey]] = {}
        for action in actions:
            stage, kind, microbatch, other = action.stage, action.kind, action.microbatch, action.peer
            if other is not None and microbatch is not None and placement[other] == device:
                if kind in RECV_KINDS:
                    reader = stage, microbatch, kind is Kind.RECV_F
                    arrived.setdefault(reader, []).append((other, stage, microbatch))
                elif read:
                    finished[action.counterpart] = tuple(read)
                    read = []
            elif kind in COMPUTE_KINDS and kind is not Kind.W:
                read += arrived.pop((stage, microbatch, kind is Kind.F), [])
    return finished
