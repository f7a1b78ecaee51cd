"""Offload in the memory policy: which saved tensors of which microbatches leave the device, and when.

Copies run on the host-copy queues, next to compute. The plan names the compute actions of the same device that frame
them, so that the memory of an order does not depend on how long a copy takes::

    compute queue     ─ 0F3 ─┬─ 0F4 ─┬─ 0F5 ─ 1B0 ─┬─ 1B1 ─┬─ 0B3 ─
                             │       │ freed_at    │       │ reads them
    host-copy queue          └▶[ OFFLOAD ]         └▶[ RELOAD ]
                                                    reload_after

The bytes are on the device until ``freed_at`` starts, which waits for the copy out, and again from the end of
``reload_after`` on. They are on the host from the end of F to the start of the backward, which waits for the copy back.
"""

from attrs import frozen

from ..actions import Action


@frozen
class Storage:
    """A storage of saved tensors that leaves the device; all tensors that are views of it leave together.

    Args:
        name: the captured value (or, for an operator graph without a capture, the operator) that allocates it.
        bytes: its size for one microbatch.
    """

    name: str
    bytes: int


@frozen
class HostCopy:
    """The way of one microbatch to the host and back.

    Args:
        microbatch: whose storages move.
        freed_at: compute action of the same device, after the F, that waits for the end of the copy out.
        reload_after: compute action of the same device, ``freed_at`` or later and before the backward, whose end starts
            the copy back.
    """

    microbatch: int
    freed_at: Action
    reload_after: Action


@frozen
class StageOffload:
    """What leaves of one stage.

    Args:
        stage: the stage.
        storages: those that are offloaded.
        copies: per microbatch that offloads, ascending.
    """

    stage: int
    storages: tuple[Storage, ...]
    copies: tuple[HostCopy, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch that are offloaded."""
        return sum(storage.bytes for storage in self.storages)
