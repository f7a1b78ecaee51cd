"""The memory rule: per kind of action what it allocates and frees, when, in which memory, and how many bytes.

All memory accounting reads this table: validation, residency, the simulator's timelines, reports, and the searches. A
microbatch's saved tensors have four sizes while it is on a stage::

                F              RECOMPUTE           I             W
    nothing ────────▶ saved ───────────────────────────▶ kept ────────▶ nothing
        │                        ▲     │
        └─────▶ input ───────────┘     └─────── B ─────────────────────▶ nothing
          (the stage recomputes)

F and RECOMPUTE allocate at their start, because they write the tensors while they run; backwards free at their end.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, product

from attrs import frozen

from ..actions import BACKWARD_KINDS, COMPUTE_KINDS, WORK_KINDS, Action, Kind
from ..costs.costs import StageCosts
from .memory_policy import Moved


class Moment(StrEnum):
    """When an action changes memory."""

    START = "start"
    END = "end"


class Memory(StrEnum):
    """Which memory changes."""

    DEVICE = "device"
    HOST = "host"


class Use(StrEnum):
    """What the bytes are for."""

    SAVED = "saved"
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"
    PARAMETERS = "parameters"


class Size(StrEnum):
    """How many bytes: a field of ``StageCosts``, or a sum of the stage's messages."""

    SAVED = "saved_bytes"
    INPUT = "input_bytes"
    KEPT = "kept_bytes"
    WORKSPACE = "workspace_bytes"
    MESSAGE = "message_bytes"
    """The send's or the receive's own message."""
    READ = "read_bytes"
    """All messages that this action reads: from other devices, and from stages of its own device."""
    PASSED = "passed_bytes"
    """All messages from this action to stages of its own device."""
    OFFLOADED = "offloaded_bytes"
    """The part of the saved tensors that the memory policy copies to the host."""
    GATHERED = "gathered_bytes"
    """The parameters that replicas share, whole; 0 for a stage whose replicas each hold them whole."""


@frozen
class Change:
    """One change of memory by one action.

    Args:
        moment: at the action's start or end.
        use: what the bytes are for.
        size: how many.
        sign: 1 allocates, −1 frees.
        memory: where.
    """

    moment: Moment
    use: Use
    size: Size
    sign: int
    memory: Memory = Memory.DEVICE


def _allocates(moment: Moment, use: Use, size: Size, memory: Memory = Memory.DEVICE) -> Change:
    return Change(moment, use, size, 1, memory)


def _frees(moment: Moment, use: Use, size: Size, memory: Memory = Memory.DEVICE) -> Change:
    return Change(moment, use, size, -1, memory)


_WORKSPACE = (
    _allocates(Moment.START, Use.WORKSPACE, Size.WORKSPACE),
    _frees(Moment.END, Use.WORKSPACE, Size.WORKSPACE),
)
_PASSED = _allocates(Moment.END, Use.COMMUNICATION, Size.PASSED)
_GRADIENT_READ = _frees(Moment.END, Use.COMMUNICATION, Size.READ)
_SENT = (
    _allocates(Moment.START, Use.COMMUNICATION, Size.MESSAGE),
    _frees(Moment.END, Use.COMMUNICATION, Size.MESSAGE),
)
_RECEIVED = (_allocates(Moment.START, Use.COMMUNICATION, Size.MESSAGE),)

CHANGES: Mapping[Kind, tuple[Change, ...]] = {
    # What F reads is one of its saved tensors from its start on.
    Kind.F: (
        _allocates(Moment.START, Use.SAVED, Size.SAVED),
        _frees(Moment.START, Use.COMMUNICATION, Size.READ),
        _PASSED,
        *_WORKSPACE,
    ),
    Kind.B: (_frees(Moment.END, Use.SAVED, Size.SAVED), _GRADIENT_READ, _PASSED, *_WORKSPACE),
    Kind.I: (
        _frees(Moment.END, Use.SAVED, Size.SAVED),
        _allocates(Moment.END, Use.SAVED, Size.KEPT),
        _GRADIENT_READ,
        _PASSED,
        *_WORKSPACE,
    ),
    Kind.W: (_frees(Moment.END, Use.SAVED, Size.KEPT), *_WORKSPACE),
    Kind.RECOMPUTE: (
        _frees(Moment.START, Use.SAVED, Size.INPUT),
        _allocates(Moment.START, Use.SAVED, Size.SAVED),
        *_WORKSPACE,
    ),
    # A send ends when its message has arrived. A received message is freed by the action that reads it.
    Kind.SEND_F: _SENT,
    Kind.SEND_B: _SENT,
    Kind.RECV_F: _RECEIVED,
    Kind.RECV_B: _RECEIVED,
    # A host slot is occupied from the start of the copy out to the end of the copy back.
    Kind.OFFLOAD: (
        _allocates(Moment.START, Use.SAVED, Size.OFFLOADED, Memory.HOST),
        _frees(Moment.END, Use.SAVED, Size.OFFLOADED),
    ),
    Kind.RELOAD: (
        _allocates(Moment.START, Use.SAVED, Size.OFFLOADED),
        _frees(Moment.END, Use.SAVED, Size.OFFLOADED, Memory.HOST),
    ),
    Kind.SCATTER_GRAD: (),
    Kind.REDUCE_GRAD: (),
    Kind.REDUCE_TIED: (),
    Kind.SYNC: (),
    Kind.STEP: (),
    # The parts that replicas hold are state. At the end of a step the parameters are gathered in the state itself.
    Kind.UNSHARD: (_allocates(Moment.START, Use.PARAMETERS, Size.GATHERED),),
    Kind.RESHARD: (_frees(Moment.START, Use.PARAMETERS, Size.GATHERED),),
}
"""The table, for stages that keep their saved tensors."""

RECOMPUTING_FORWARD = (_allocates(Moment.START, Use.SAVED, Size.INPUT), *CHANGES[Kind.F][1:])
"""F of a stage that recomputes: it saves only its inputs."""
FORWARD_ONLY = (_frees(Moment.END, Use.COMMUNICATION, Size.READ), _PASSED, *_WORKSPACE)
"""F of a plan without backwards: nothing is saved, and what F reads is freed when it ends."""


def changes(kind: Kind, *, recomputes: bool = False, forward_only: bool = False) -> tuple[Change, ...]:
    """The memory changes of an action."""
    if kind is Kind.F and forward_only:
        return FORWARD_ONLY
    if kind is Kind.F and recomputes:
        return RECOMPUTING_FORWARD
    return CHANGES[kind]


@lru_cache(maxsize=4096)
def compute_bytes(
    cost: StageCosts, *, recomputes: bool = False, forward_only: bool = False
) -> Mapping[Kind, tuple[float, ...]]:
    """Per kind of the compute queue the changes of saved bytes at its start and its end, then of workspace likewise."""
    result = {}
    for kind in WORK_KINDS:
        totals = dict.fromkeys(product((Use.SAVED, Use.WORKSPACE), Moment), 0.0)
        for change in changes(kind, recomputes=recomputes, forward_only=forward_only):
            if (change.use, change.moment) in totals:
                totals[change.use, change.moment] += change.sign * getattr(cost, change.size)
        result[kind] = tuple(totals.values())
    return result


@lru_cache(maxsize=4096)
def saved_bytes(cost: StageCosts, *, recomputes: bool = False) -> Mapping[Kind, tuple[float, float]]:
    """Per kind of a compute order the changes of the saved tensors at an action's start and end, in bytes."""
    found = compute_bytes(cost, recomputes=recomputes)
    second = found[Kind.RECOMPUTE][0] if recomputes else 0.0
    begins = {kind: found[kind][0] + (second if kind in BACKWARD_KINDS else 0.0) for kind in COMPUTE_KINDS}
    return {kind: (begins[kind], found[kind][1]) for kind in COMPUTE_KINDS}


# The bytes of an order. An order of n compute actions has 2 · n + 1 *places* at which bytes change: 0 before all,
# 2 · i + 1 at the start of action i, and 2 · i + 2 at its end. What is issued after i actions changes them at 2 · i.


def order_changes(
    actions: Sequence[Action], costs: Sequence[StageCosts], recompute: Collection[int] = (), *, workspace: bool = False
) -> list[float]:
    """What a compute order changes of the saved tensors of its device, in bytes, by place.

    Args:
        recompute: the stages that recompute.
        workspace: count the workspace of the running action, too.
    """
    table = {}
    for stage in dict.fromkeys(action.stage for action in actions):
        most = costs[stage].workspace_bytes if workspace else 0.0
        found = saved_bytes(costs[stage], recomputes=stage in recompute)
        table[stage] = {kind: (at_start + most, at_end - most) for kind, (at_start, at_end) in found.items()}
    changed = [0.0]
    for action in actions:
        changed += table[action.stage][action.kind]
    return changed


def place_of(moment: Moment, issued: int, reader: int | None) -> int:
    """The place of a change by an action of another queue than compute: its start is when it is issued, its end when
    its reader starts, or the end of the step."""
    return 2 * issued if moment is Moment.START else -1 if reader is None else 2 * reader + 1


def held_bytes(changed: Sequence[float], copies: Iterable[Moved] = (), memory: Memory = Memory.DEVICE) -> list[float]:
    """The bytes from each place on: the running sum of changes.

    Residency sums the same places with messages and with times, for every kind of memory; searches sum them compiled,
    in `peak` of core/timing.

    Args:
        changed: by place; zeros for copies alone.
        copies: copies to the host and back, which change the memory, too.
        memory: whose bytes.
    """
    found = list(changed)
    for kind, issued, reader, size in copies:
        for change in CHANGES[kind]:
            if change.memory is memory:
                found[place_of(change.moment, issued, reader)] += change.sign * size
    return list(accumulate(found))
