"""The memory policy of a plan, as data: offload, and runs of whole parameters.

Offload: which saved tensors of which microbatches are copied to the host, and when.

Copies run on the host-copy queues, concurrently with compute. The plan names the compute actions between which each
copy runs, so that the memory of an order does not depend on how long a copy takes::

    compute queue     ─ 0F3 ─┬─ 0F4 ─┬─ 0F5 ─ 1B0 ─┬─ 1B1 ─┬─ 0B3 ─
                             │       │ freed_at    │       │ reads them
    host-copy queue          └▶[ OFFLOAD ]         └▶[ RELOAD ]
                                                    reload_after

The bytes are on the device until ``freed_at`` starts, which waits for the copy out, and again from the end of
``reload_after`` on. They are on the host from the end of F to the start of the backward, which waits for the copy back.

Unsharding: when the parameters of a stage are whole, where its replicas share them (ZeRO-3).

Each replica holds a part of the parameters. A stage needs them whole while it computes, so the plan gathers them for
*runs* of its actions, and frees them after each::

    compute queue        ─ 0F0 ─ 0F1 ─┬─ 1F0 ─ 1F1 ─ 1B0 ─┬─ 1B1 ─ 0B0 ─ 0B1 ─
                                      │ RESHARD of run 0  │ after           first of run 1
    collective queue     [UNSHARD 0]                      └▶[ UNSHARD 1 ]

The bytes of whole parameters are on the device from the end of ``after`` to the end of ``last``. ``first`` waits for
the all-gather.
"""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from attrs import frozen

from ..actions import Action, Kind


@frozen
class Storage:
    """A storage of saved tensors that is offloaded, with all tensors that are views of it.

    Args:
        name: the captured value (or, for an operator graph without a capture, the operator) that allocates it.
        bytes: its size for one microbatch.
    """

    name: str
    bytes: int


@frozen
class HostCopy:
    """The copies of one microbatch's storages to the host and back.

    Args:
        microbatch: the microbatch.
        freed_at: compute action of the same device, after the F, that waits for the end of the copy out.
        reload_after: compute action of the same device, ``freed_at`` or later and before the backward, whose end starts
            the copy back.
    """

    microbatch: int
    freed_at: Action
    reload_after: Action


@frozen
class StageOffload:
    """The offloaded tensors of one stage.

    Args:
        stage: the stage.
        storages: the offloaded storages, the same for each microbatch.
        copies: one for each microbatch that is offloaded, ascending.
    """

    stage: int
    storages: tuple[Storage, ...]
    copies: tuple[HostCopy, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch that are offloaded."""
        return sum(storage.bytes for storage in self.storages)


def backward_of(stage: int, microbatch: int, actions: Container[Action]) -> Action:
    """The B of a stage and microbatch if it is among these actions; otherwise the I: their backward is split."""
    full = Action(stage, Kind.B, microbatch)
    return full if full in actions else Action(stage, Kind.I, microbatch)


Moved = tuple[Kind, int, int, float]
"""A host copy: its kind, how many compute actions have ended when it is issued, the position of the one that waits for
it, and its bytes."""


class TimedCopy(NamedTuple):
    """The copies of one microbatch's storages to the host and back, by positions in the device's compute order.

    Args:
        forward: position of the F, whose end issues the copy to the host.
        freed_at: position of the action that waits for that copy.
        reload_after: position of the action whose end issues the copy back.
        reader: position of the B or I that waits for the copy back.
        out_s, back_s: seconds of the two copies on idle links.
        bytes: size of the storages.
    """

    forward: int
    freed_at: int
    reload_after: int
    reader: int
    out_s: float
    back_s: float
    bytes: float


def moved(copies: Iterable[TimedCopy]) -> Iterator[Moved]:
    """Each copy to the host, and each one back."""
    for copy in copies:
        yield Kind.OFFLOAD, copy.forward + 1, copy.freed_at, copy.bytes
        yield Kind.RELOAD, copy.reload_after + 1, copy.reader, copy.bytes


@frozen
class UnshardedRun:
    """A run of actions of one stage, in the compute order of its device, during which its parameters are whole.

    Args:
        after: the action whose end starts the all-gather; None for the start of the step.
        first, last: the first and the last action of the run; None for a run of microbatches that this replica does not
            have in this step: it takes part in the all-gather.
    """

    after: Action | None
    first: Action | None
    last: Action | None


@frozen
class StageUnshard:
    """The runs of one stage.

    Args:
        stage: the stage.
        runs: in order; each action of the stage is in one.
    """

    stage: int
    runs: tuple[UnshardedRun, ...]
