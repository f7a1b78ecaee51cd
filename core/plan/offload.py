"""Offload in the memory policy: which saved tensors of which microbatches are copied to the host, and when.

Copies run on the host-copy queues, concurrently with compute. The plan names the compute actions between which each
copy runs, so that the memory of an order does not depend on how long a copy takes::

    compute queue     ─ 0F3 ─┬─ 0F4 ─┬─ 0F5 ─ 1B0 ─┬─ 1B1 ─┬─ 0B3 ─
                             │       │ freed_at    │       │ reads them
    host-copy queue          └▶[ OFFLOAD ]         └▶[ RELOAD ]
                                                    reload_after

The bytes are on the device until ``freed_at`` starts, which waits for the copy out, and again from the end of
``reload_after`` on. They are on the host from the end of F to the start of the backward, which waits for the copy back.
"""

from collections.abc import Container

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
