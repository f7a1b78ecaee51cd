"""What the ranks that share a stage's microbatches exchange inside an operator or a stage, as part of F, B and I.

==========  =========================  ==========================================================================
ranks       share of a microbatch      what they exchange
==========  =========================  ==========================================================================
tensor      all of it, by features     all-reduces: two a transformer block in F, and in B (Megatron-LM, arXiv
                                       1909.08053, section 3)
context     tokens of each sample      keys and values in a ring, in the backward with their gradients (Ring
                                       Attention, arXiv 2310.01889); what their computation does not cover is exposed
experts     samples                    tokens to the ranks of their experts and back, by all-to-all (GShard, arXiv
                                       2006.16668)
==========  =========================  ==========================================================================

A rank waits for each exposed exchange, so their time is part of F, B and I.
"""

from collections.abc import Iterable, Mapping

from attrs import evolve, frozen, resolve_types

from ..cluster.rank_kinds import TENSOR_RANKS


@frozen
class TensorReductions:
    """The exchanges of an operator or a stage over ranks of one kind, for one microbatch.

    Args:
        forward, backward: number in F, and in B or I.
        forward_bytes, backward_bytes: size on one rank, all together: of the reduced tensors, of what a rank passes on
            in the ring, or of the tokens that it sends.
        forward_s, backward_s: their time without contention, which is part of the time of F, and of B and I.
        ranks: number of ranks; 0 while it is not known.
        over: the kind of ranks.
        more: the exchanges over ranks of other kinds.
    """

    forward: int = 0
    backward: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    ranks: int = 0
    over: str = TENSOR_RANKS
    more: tuple["TensorReductions", ...] = ()

    @property
    def each(self) -> tuple["TensorReductions", ...]:
        """These exchanges by kind of ranks, each without the others."""
        return evolve(self, more=()), *self.more

    @property
    def seconds(self) -> tuple[float, float]:
        """Time of all kinds together in F, and in B or I."""
        return sum(one.forward_s for one in self.each), sum(one.backward_s for one in self.each)

    def exposed(self, forward: float, backward: float) -> "TensorReductions":
        """The part of them that a rank waits for: these shares of F and of B."""
        return evolve(
            self,
            forward=round(self.forward * forward),
            backward=round(self.backward * backward),
            forward_bytes=round(self.forward_bytes * forward),
            backward_bytes=round(self.backward_bytes * backward),
        )

    def timed(self, ranks: int, latency_s: float, s_per_byte: float) -> "TensorReductions":
        """The same over this many ranks, with times: ``latency_s`` for each, ``s_per_byte`` for each byte."""
        return evolve(
            self,
            ranks=ranks,
            forward_s=self.forward * latency_s + self.forward_bytes * s_per_byte,
            backward_s=self.backward * latency_s + self.backward_bytes * s_per_byte,
        )

    def recomputed(self) -> "TensorReductions":
        """The same with those of F also in the backward, which computes F again."""
        return evolve(
            self,
            backward=self.backward + self.forward,
            backward_bytes=self.backward_bytes + self.forward_bytes,
            backward_s=self.backward_s + self.forward_s,
            more=tuple(one.recomputed() for one in self.more),
        )


resolve_types(TensorReductions)  # which names itself: files have exchanges of other kinds within


def sum_of(found: Iterable[TensorReductions | None]) -> TensorReductions | None:
    """The exchanges of several operators together; None if none has any."""
    by_kind: dict[str, list[TensorReductions]] = {}
    for one in (each for whole in found if whole is not None for each in whole.each):
        by_kind.setdefault(one.over, []).append(one)
    sums = [
        TensorReductions(
            sum(one.forward for one in each),
            sum(one.backward for one in each),
            sum(one.forward_bytes for one in each),
            sum(one.backward_bytes for one in each),
            sum(one.forward_s for one in each),
            sum(one.backward_s for one in each),
            each[0].ranks,
            over,
        )
        for over, each in by_kind.items()
    ]
    return evolve(sums[0], more=tuple(sums[1:])) if sums else None


@frozen
class Ring:
    """Times of exchanges over ranks of one kind: of each one, and of each byte (see `TensorReductions`)."""

    ranks: int
    latency_s: float
    s_per_byte: float


Rings = Mapping[str, Ring]
"""The ring of each kind of ranks."""


@frozen
class Overlap:
    """How much of the all-reduces over tensor ranks a rank waits for; the rest runs while it computes.

    Args:
        forward, backward: shares of F's and of the backward's that are exposed.
        slowed: share of its multiprocessors that a device lacks while the others run.
    """

    forward: float = 1.0
    backward: float = 1.0
    slowed: float = 0.0
