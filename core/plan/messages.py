"""Messages: each send of the lowered lists with its receive, and the operations between which both stand.

A device's *operations* are what occupies its compute queue: F, B, I, W, RECOMPUTE and STEP. Everything else that it
issues is pinned between two of them: a send behind the operation that was issued last, a receive in front of the next
one::

    issued         1RECV_F0<0   1F0   1SEND_F0>2   1RECV_B0<2   1B0
    operation                    0                                1
    message 0F0>1  posted=0, reader=0
    message 1F0>2                     issued=0
    message 2B0>1                                  posted=1, reader=1
"""

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from ..actions import Action, Kind
from ..errors import RequestError
from .plan import Plan

_F, _B, _I, _W, _RECOMPUTE, _STEP = Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE, Kind.STEP
_SEND_F, _SEND_B, _RECV_F, _RECV_B, _TIED = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B, Kind.REDUCE_TIED
_GRAD, _SYNC = Kind.REDUCE_GRAD, Kind.SYNC


class Message(NamedTuple):
    """One message from one device to another.

    Args:
        send: the action that sends it.
        receive: the action that receives it.
        src, dst: the two devices.
        bytes: its size.
        issued: the sender's operation behind which it is sent.
        posted: the receiver's operation in front of which its receive is posted.
        reader: the receiver's operation that reads it.
    """

    send: Action
    receive: Action
    src: int
    dst: int
    bytes: float
    issued: int
    posted: int
    reader: int


@frozen
class Exchange:
    """Lowered lists, taken apart.

    Args:
        operations: per device what occupies its compute queue, in order.
        reductions: per device ``(operation in front of which it stands, stage)`` of every REDUCE_TIED.
        gradients: the same of every REDUCE_GRAD.
        queues: the messages of every ordered pair of devices, in the order in which both ends have them.
        syncs: per device the operation in front of which its SYNC stands; None without one.
    """

    operations: tuple[tuple[Action, ...], ...]
    reductions: tuple[tuple[tuple[int, int], ...], ...]
    gradients: tuple[tuple[tuple[int, int], ...], ...]
    queues: dict[tuple[int, int], list[Message]]
    syncs: tuple[int | None, ...]

    def replicated(self, replicas: int) -> "Exchange":
        """The same for ``replicas`` equal pipelines, device d of replica r being number ``r × devices + d``.

        The replicas' queues hold the very messages of the first: their ``src`` and ``dst`` are positions along the
        pipeline.
        """
        if replicas == 1:
            return self
        count = len(self.operations)
        queues = {
            (first + src, first + dst): messages
            for first in range(0, replicas * count, count)
            for (src, dst), messages in self.queues.items()
        }
        return Exchange(
            self.operations * replicas, self.reductions * replicas, self.gradients * replicas, queues,
            self.syncs * replicas,
        )  # fmt: skip


Posted = dict[tuple[int, int], list[tuple[Action, int]]]
Positions = dict[tuple[int, int | None], int]


def match_messages(plan: Plan, lowered: Sequence[Sequence[Action]]) -> Exchange:
    """Match every send with its receive.

    Args:
        plan: its placement and edges.
        lowered: per device its actions, by ``lower`` or by hand; nothing of how ``lower`` works is taken for granted.

    Raises:
        RequestError: an action stands on the wrong device; a send or receive has no counterpart, or the two ends of a
            queue differ in order; a message is sent before it was computed, received behind its reader, twice, or not
            at all; a stage's gradients are reduced elsewhere than between its last backward and its STEP, or over a
            mesh without a data dimension.
    """
    sent: Posted = {}
    received: Posted = {}
    syncs: list[int | None] = []
    operations, reductions, gradients = [], [], []
    forward: list[Positions] = []
    backward: list[Positions] = []
    for device, actions in enumerate(lowered):
        ops: list[Action] = []
        tied: list[tuple[int, int]] = []
        reduced: list[tuple[int, int]] = []
        forward_at: Positions = {}
        backward_at: Positions = {}
        sync: int | None = None
        for action in actions:
            kind = action.kind
            if kind is _F:
                forward_at[action.stage, action.microbatch] = len(ops)
                ops.append(action)
            elif kind is _B or kind is _I:
                backward_at[action.stage, action.microbatch] = len(ops)
                ops.append(action)
            elif kind is _W or kind is _RECOMPUTE or kind is _STEP:
                ops.append(action)
            elif kind is _SEND_F or kind is _SEND_B:
                sent.setdefault((device, _peer_device(plan, device, action)), []).append((action, len(ops) - 1))
            elif kind is _RECV_F or kind is _RECV_B:
                received.setdefault((_peer_device(plan, device, action), device), []).append((action, len(ops)))
            elif kind is _SYNC:
                _check_sync(plan, device, action, sync, ops)
                sync = len(ops)
            elif kind is _TIED or kind is _GRAD:
                if sync is not None:
                    raise RequestError(_early_sync(device, action))
                (tied if kind is _TIED else reduced).append((len(ops), action.stage))
            else:
                raise RequestError(f"device {device} issues {action}: no runner of this version knows how; remove it")
        operations.append(tuple(ops))
        reductions.append(tuple(tied))
        gradients.append(tuple(reduced))
        _check_synced(plan, device, sync, ops)
        syncs.append(sync)
        forward.append(forward_at)
        backward.append(backward_at)
    queues = {
        pair: _match_queue(plan, pair, sent.get(pair, []), received.get(pair, []), (forward, backward))
        for pair in (*sent, *(pair for pair in received if pair not in sent))
    }
    _check_complete(plan, queues)
    exchange = Exchange(tuple(operations), tuple(reductions), tuple(gradients), queues, tuple(syncs))
    _check_gradients(plan, exchange)
    return exchange


def _check_sync(plan: Plan, device: int, action: Action, before: int | None, ops: Sequence[Action]) -> None:
    """A SYNC of a plan that has one stands once, in front of the STEPs."""
    where = f"device {device} issues {action}"
    if not plan.sync:
        raise RequestError(f"{where} and the plan's steps wait for no other stage (sync is false): remove it")
    if before is not None:
        raise RequestError(f"{where} twice: a device agrees with the others once a step; remove one")
    step = next((a for a in ops if a.kind is _STEP), None)
    if step is not None:
        raise RequestError(f"{where} behind {step}, which waits for it: move it in front")


def _check_synced(plan: Plan, device: int, sync: int | None, ops: Sequence[Action]) -> None:
    """Where steps wait for all stages, every device with a stage has a SYNC, behind its backwards."""
    if not plan.sync or not plan.stages_on(device):
        return
    if sync is None:
        raise RequestError(f"device {device} issues no SYNC, and the plan's steps wait for all stages: add it")
    late = next((a for a in ops[sync:] if a.kind is not _STEP), None)
    if late is not None:
        raise RequestError(_early_sync(device, late))


def _early_sync(device: int, action: Action) -> str:
    return f"the SYNC of device {device} stands in front of {action}: it tells of whole gradients; move it behind"


def _check_gradients(plan: Plan, exchange: Exchange) -> None:
    """Over a data dimension every stage has one REDUCE_GRAD, behind its last backward and in front of its STEP.

    A plan that is forward only has none.
    """
    for device, (actions, reduced) in enumerate(zip(exchange.operations, exchange.gradients, strict=True)):
        stages = [stage for _, stage in reduced]
        if stages and (plan.mesh.data == 1 or plan.forward_only):
            why = "is forward only" if plan.forward_only else "has one replica"
            raise RequestError(
                f"device {device} issues {stages[0]}REDUCE_GRAD and the plan {why}: there is nothing to reduce; "
                "remove it"
            )
        if (
            plan.mesh.data > 1
            and not plan.forward_only
            and sorted(stages) != sorted(stage.index for stage in plan.stages_on(device))
        ):
            raise RequestError(
                f"device {device} issues REDUCE_GRAD of stages {stages} and holds "
                f"{[stage.index for stage in plan.stages_on(device)]}: over replicas each stage reduces once"
            )
        for at, stage in reduced:
            early = next((a for a in actions[at:] if a.stage == stage and a.kind is not _STEP), None)
            late = next((a for a in actions[:at] if a.stage == stage and a.kind is _STEP), None)
            if early is not None or late is not None:
                raise RequestError(
                    f"{stage}REDUCE_GRAD stands in front of {early}: move it behind"
                    if early is not None
                    else f"{stage}REDUCE_GRAD stands behind {late}: move it in front"
                )


def _peer_device(plan: Plan, device: int, action: Action) -> int:
    """Device at the other end of a communication that ``device`` issues."""
    placement = plan.placement
    stages = len(placement)
    if action.peer is None or not (0 <= action.stage < stages and 0 <= action.peer < stages):
        raise RequestError(
            f"{action} on device {device} names no pair of stages: a plan of {stages} has 0 to {stages - 1}"
        )
    if placement[action.stage] != device:
        raise RequestError(
            f"{action} is issued by device {device}, and stage {action.stage} lives on device "
            f"{placement[action.stage]}: move it there"
        )
    if placement[action.peer] == device:
        raise RequestError(f"{action} stays on device {device}: stages of one device do not communicate; remove it")
    return placement[action.peer]


def _match_queue(
    plan: Plan,
    pair: tuple[int, int],
    sent: list[tuple[Action, int]],
    received: list[tuple[Action, int]],
    positions: tuple[list[Positions], list[Positions]],
) -> list[Message]:
    src, dst = pair
    forward, backward = positions
    sizes = {(edge.src, edge.dst): edge for edge in plan.edges}
    messages: list[Message] = []
    for (send, issued), (receive, posted) in zip(sent, received, strict=False):
        is_forward = send.kind is _SEND_F
        stage, peer, microbatch = send.stage, send.peer, send.microbatch
        if (
            receive.stage != peer
            or receive.peer != stage
            or receive.microbatch != microbatch
            or (receive.kind is _RECV_F) != is_forward
        ):
            raise RequestError(
                f"message {len(messages)} from device {src} to {dst} is {send} at the sender and {receive} at the "
                "receiver: both ends have one order; move the receive"
            )
        edge = sizes.get((stage, peer) if is_forward else (peer, stage))
        if edge is None or not (is_forward or edge.gradient_bytes > 0):
            raise RequestError(f"{send} travels along no edge of the plan: remove it and its receive")
        ready = (forward if is_forward else backward)[src].get((stage, microbatch))
        if ready is None or ready > issued:
            raise RequestError(f"{send} stands in front of what it sends: move it behind {_maker(send)}")
        reader = (forward if is_forward else backward)[dst].get((peer, microbatch))
        if reader is None or reader < posted:
            raise RequestError(f"{receive} stands behind what reads it: move it in front of {_maker(receive)}")
        size = edge.bytes if is_forward else edge.gradient_bytes
        messages.append(Message(send, receive, src, dst, size, issued, posted, reader))
    if len(sent) != len(received):
        lonely = (sent if len(sent) > len(received) else received)[len(messages)][0]
        raise RequestError(
            f"{lonely} has no counterpart: device {src} sends {len(sent)} messages to device {dst}, which receives "
            f"{len(received)}; add {lonely.counterpart}, or remove it"
        )
    return messages


def _maker(action: Action) -> str:
    kind = "F" if action.kind in (_SEND_F, _RECV_F) else "backward"
    return f"stage {action.stage}'s {kind} of microbatch {action.microbatch}"


def _check_complete(plan: Plan, queues: dict[tuple[int, int], list[Message]]) -> None:
    """Every edge between devices carries each microbatch once."""
    where = plan.placement
    expected = sum(
        (1 + (edge.gradient_bytes > 0)) * plan.microbatches for edge in plan.edges if where[edge.src] != where[edge.dst]
    )
    found = [message.send for queue in queues.values() for message in queue]
    if len(found) == expected:
        seen = {(send.stage, send.peer, send.microbatch) for send in found}
        if len(seen) == expected:
            return
    _explain_incomplete(plan, found)


def _explain_incomplete(plan: Plan, found: list[Action]) -> None:
    left = set(found)
    if len(left) < len(found):
        twice = next(send for i, send in enumerate(found) if send in found[:i])
        raise RequestError(f"{twice} is sent twice: each message is sent once; remove one and its receive")
    for edge in plan.edges:
        if plan.placement[edge.src] == plan.placement[edge.dst]:
            continue
        for microbatch in range(plan.microbatches):
            wanted = [Action(edge.src, _SEND_F, microbatch, edge.dst)]
            if edge.gradient_bytes > 0:
                wanted.append(Action(edge.dst, _SEND_B, microbatch, edge.src))
            for send in wanted:
                if send not in left:
                    raise RequestError(f"{send} is missing: stage {send.peer} reads it; add it and {send.counterpart}")
                left.discard(send)
    raise RequestError(f"{min(map(str, left))} sends a microbatch that the plan does not have: remove it")
