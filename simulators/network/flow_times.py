"""Times and rates of a flow."""

from typing import NamedTuple

Direction = tuple[str, str]
"""A link in one direction: names of the devices or hubs at its start and end."""


class Piece(NamedTuple):
    """A part of a flow's time in which its rate did not change.

    Args:
        start_s, end_s: when.
        rate: bytes/s over each path of the flow.
        held_by: the full link that limits its rate; None without contention.
    """

    start_s: float
    end_s: float
    rate: float
    held_by: Direction | None


class FlowTimes(NamedTuple):
    """Bytes that drained through links.

    Args:
        links: the links crossed; each is listed as often as it was crossed.
        bytes: over each path.
        bytes_per_s: rate without contention.
        start_s, drained_s: when the first and the last byte left.
        pieces: from start to end; None is one piece at ``bytes_per_s``.
    """

    links: tuple[Direction, ...]
    bytes: float
    bytes_per_s: float
    start_s: float
    drained_s: float
    pieces: tuple[Piece, ...] | None = None

    @property
    def alone_s(self) -> float:
        """Time from start to end without contention."""
        return self.bytes / self.bytes_per_s

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """Its rate from start to end."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(self.start_s, self.drained_s, self.bytes_per_s, None),)
