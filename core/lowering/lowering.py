"""Lowering: from each device's compute order to all actions that it issues, with the order of sends and receives.

A plan orders compute only. Lowering adds sends, receives, reductions and optimizer steps, the same for the simulator
and every runtime::

    compute order of device 1:                      1F0                  1F1          1B0
    lowered, prefetch 1:        1RECV_F0<0 1RECV_F1<0 1F0 1SEND_F0>2 1RECV_B0<2 1F1 … 1B0 1SEND_B0>0 … 1STEP

1. Only edges between stages on different devices are communicated, one message for each edge and microbatch.
2. A send directly follows the action that computes its tensors. There is one in-order queue from one device to
   another, so the order of the sends *is* the order of the receives.
3. A receive is posted ``prefetch`` compute actions before its reader, and earlier where the order of its queue requires
   it. It is never posted after its reader, so lowering cannot turn a sound compute order into a deadlock.
4. A stage that recomputes has a RECOMPUTE directly before each B or I, after the receives at that position. It waits
   for no message, so it runs while the gradient is still in transit.
5. A microbatch that offloads has an OFFLOAD after the sends of its F, and a RELOAD after the action that the plan's
   memory policy names (see ``policies/offload.py``).
6. Where replicas share parameters, each run of a stage has an UNSHARD after the action that the memory policy names,
   and a RESHARD after its last one (see ``policies/replicas.py``).
"""

import sys
from collections.abc import Iterable
from operator import itemgetter

from ..actions import AT_START, BACKWARD_KINDS, Action, Kind
from ..errors import RequestError
from ..plan.kinds import AFTER_STEP, declarations
from ..plan.plan import Plan
from ..policies.end_of_step import optimizer_steps
from .queues import Positions, computed_at

Lowered = tuple[tuple[Action, ...], ...]
"""Per device its actions in the order in which it issues them."""


def lower(plan: Plan, prefetch: int = 2) -> Lowered:
    """All actions that each device issues, in order. Linear in the number of actions.

    Args:
        plan: a plan with a sound compute order and memory policy.
        prefetch: how many compute actions a receive is posted ahead of its reader; at least 0.

    Returns:
        Per device along the pipeline its actions: F, B, I, W in the plan's order, with RECOMPUTE, SEND, RECV, OFFLOAD
        and RELOAD between them, and REDUCE_GRAD of every stage if ``mesh.data`` is above 1; then REDUCE_TIED per stage
        with a tied weight, one SYNC per device if the plan's steps wait for all stages, and STEP per stage, with an
        UNSHARD after it if its replicas share its optimizer, but not its parameters; UNSHARD and RESHARD of every run
        if they share its parameters. For a forward-only plan F, SEND_F and RECV_F only.

    Raises:
        RequestError: ``prefetch`` is negative, or no action reads a message that the plan sends.
    """
    if prefetch < 0:
        raise RequestError(f"prefetch is {prefetch}: a receive cannot be posted after its reader; give at least 0")
    recompute = frozenset(plan.memory.recompute)
    peers = _Peers(plan)
    queues: dict[tuple[int, int], list[Action]] = {}
    sends = [[_sends(action, peers, queues) for action in actions] for actions in plan.device_actions]
    readers = {dst: computed_at(plan.device_actions[dst]) for _, dst in queues}
    starts: list[list[Action]] = [[] for _ in plan.device_actions]
    ends: list[list[Action]] = [[] for _ in plan.device_actions]
    steps = [optimizer_steps(plan, device) for device in range(plan.devices)]
    for declaration in declarations():
        for device, after in enumerate(sends):
            _insert(declaration.insert(plan, device), starts[device], after, ends[device], steps[device])
    receives: list[Placed] = [{} for _ in plan.device_actions]
    for (src, dst), messages in queues.items():
        _place(src, messages, readers[dst], prefetch, receives[dst])
    return tuple(
        (
            *starts[device],
            *_merged(actions, receives[device], sends[device], [*ends[device], *steps[device]], recompute),
        )
        for device, actions in enumerate(plan.device_actions)
    )


Placed = dict[int, list[tuple[int, int, int, Action]]]
"""Receives by the compute position that they precede, each with its sorting key first."""


class _Peers:
    """Per stage the stages on other devices that it sends to, in order."""

    def __init__(self, plan: Plan) -> None:
        where = self.where = plan.placement
        count = len(where)
        self.forward: list[list[int]] = [[] for _ in range(count)]
        self.backward: list[list[int]] = [[] for _ in range(count)]
        for edge in sorted(plan.edges, key=lambda e: (e.src, e.dst)):
            if where[edge.src] != where[edge.dst]:
                self.forward[edge.src].append(edge.dst)
                if edge.gradient_bytes > 0:
                    self.backward[edge.dst].append(edge.src)


def _sends(action: Action, peers: _Peers, queues: dict[tuple[int, int], list[Action]]) -> list[Action]:
    """The sends after one compute action; their receives are appended to the queues between the two devices."""
    stage, kind = action.stage, action.kind
    targets = peers.forward[stage] if kind is Kind.F else () if kind is Kind.W else peers.backward[stage]
    if not targets:
        return []
    microbatch, send, receive = action.microbatch, Kind.SEND_B, Kind.RECV_B
    if kind is Kind.F:
        send, receive = Kind.SEND_F, Kind.RECV_F
    for peer in targets:
        queue = queues.setdefault((peers.where[stage], peers.where[peer]), [])
        queue.append(Action(peer, receive, microbatch, stage))
    return [Action(stage, send, microbatch, peer) for peer in targets]


def _insert(
    actions: Iterable[tuple[int | None, Action]],
    start: list[Action],
    after: list[list[Action]],
    end: list[Action],
    steps: list[Action],
) -> None:
    """Insert actions of a kind before or after all compute, after compute positions, or after the STEP of a stage."""
    for position, action in actions:
        if position is None:
            end.append(action)
        elif position == AT_START:
            start.append(action)
        elif position == AFTER_STEP:
            steps.insert(steps.index(Action(action.stage, Kind.STEP)) + 1, action)
        else:
            after[position].append(action)


def _place(
    src: int,
    messages: list[Action],
    readers: tuple[Positions, Positions],
    prefetch: int,
    receives: Placed,
) -> None:
    """Insert one queue's receives before compute positions, as late as its order and ``prefetch`` allow."""
    forward, backward = readers
    first_reader = sys.maxsize
    for order in range(len(messages) - 1, -1, -1):
        message = messages[order]
        reader = (forward if message.kind is Kind.RECV_F else backward).get((message.stage, message.microbatch))
        if reader is None:
            raise RequestError(
                f"nothing reads {message}: stage {message.stage} has no "
                f"{'F' if message.kind is Kind.RECV_F else 'B or I'} of microbatch {message.microbatch} on its device; "
                "add it to the compute order"
            )
        first_reader = min(first_reader, reader)
        receives.setdefault(max(0, first_reader - prefetch), []).append((first_reader, src, order, message))


def _merged(
    actions: Iterable[Action],
    receives: Placed,
    sends: list[list[Action]],
    end: list[Action],
    recompute: frozenset[int],
) -> tuple[Action, ...]:
    lowered: list[Action] = []
    for position, action in enumerate(actions):
        if position in receives:
            entries = receives[position]
            if len(entries) > 1:
                entries.sort(key=itemgetter(0, 1, 2))
            lowered += [entry[3] for entry in entries]
        if action.stage in recompute and action.kind in BACKWARD_KINDS:
            lowered.append(Action(action.stage, Kind.RECOMPUTE, action.microbatch))
        lowered.append(action)
        lowered += sends[position]
    return (*lowered, *end)
