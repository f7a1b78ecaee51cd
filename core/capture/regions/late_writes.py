"""Refuses writes of a region to buffers that it did not write for the example, as in "count batches, then average".

The buffers that a region writes are observed in one run on the example, and another run may take another branch. So
every buffer that is cheap to copy counts as written, and a run that writes another one is refused, because its value
would be lost.
"""

from collections.abc import Mapping

from torch import Tensor

from ...errors import RequestError

CHEAP_BYTES = 1 << 16
"""Buffers up to this size count as written by every region that reads them: a copy of one takes some microseconds."""


def may_be_written(buffer: Tensor) -> bool:
    """Whether a buffer of a region counts as written, even if the example's run did not write it."""
    return buffer.nbytes <= CHEAP_BYTES


class Version:
    """A buffer before a run.

    Args:
        tensor: the buffer.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether this is the same tensor, and it was not written since."""
        return tensor is self._tensor and self._tensor._version == self._version


def refuse_late_writes(who: str, before: Mapping[str, Version], after: Mapping[str, Tensor]) -> None:
    """Refuse a run that wrote a buffer that the example's run did not write.

    Args:
        who: the region's name, with its line.
        before: the buffers that do not count as written, by name.
        after: the same buffers after the run.

    Raises:
        RequestError: one of them was written.
    """
    name = next((name for name, version in before.items() if not version.is_of(after.get(name))), None)
    if name is not None:
        raise RequestError(
            f"{who} writes its buffer '{name}' here and did not for the example, and it is larger than "
            f"{CHEAP_BYTES >> 10} KiB: write it in every call, with its own values if they do not change"
        )
