"""Where saved tensors go: the host's memory, or a file."""

import tempfile
from pathlib import Path

from attrs import field, frozen

from ...core.arguments import byte_size
from ...core.errors import RequestError

HOST, DISK = "host", "disk"


def _limit(host_memory: int | str | None) -> int | None:
    found = byte_size("host", host_memory)
    return None if found is None else int(found)


@frozen
class OffloadTier:
    """Where saved tensors go, and how much of it may be used.

    Args:
        to: ``"host"``: the host's memory, pinned for a GPU; ``"disk"``: a file in the folder for temporary files; or
            the folder of that file.
        host_memory: bytes that the saved tensors of all devices of a host may occupy there, or ``"20GB"``; None for
            what is free.

    Attributes:
        folder: of the file; None for the host's memory.

    Raises:
        RequestError: there is no such folder, or an amount is negative.
    """

    to: str | Path = HOST
    host_memory: int | None = field(default=None, converter=_limit)
    folder: Path | None = field(init=False)

    @folder.default
    def _folder(self) -> Path | None:
        if self.to == HOST:
            return None
        folder = Path(tempfile.gettempdir() if self.to == DISK else self.to)
        if not folder.is_dir():
            raise RequestError(
                f"offload_to is {str(self.to)!r}: give '{HOST}', '{DISK}' (a file in the folder for temporary files), "
                "or a folder that exists"
            )
        return folder
