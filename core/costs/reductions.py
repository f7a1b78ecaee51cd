"""All-reduces inside an operator or a stage, over the tensor ranks that share its work (tensor parallelism).

Column-parallel and row-parallel layers, attention heads and a vocabulary over t tensor ranks need two all-reduces a
transformer block in the forward and two in the backward (Megatron-LM, arXiv 1909.08053, section 3). A rank waits for
each of them, so their time is part of F, B and I.
"""

from collections.abc import Iterable

from attrs import evolve, frozen


@frozen
class TensorReductions:
    """The all-reduces over tensor ranks of an operator or a stage, for one microbatch.

    Args:
        forward, backward: number in F, and in B or I.
        forward_bytes, backward_bytes: size of the reduced tensors on one rank, all together.
        forward_s, backward_s: their time without contention, which is part of the time of F, and of B and I.
        ranks: number of tensor ranks; 0 while it is not known.
    """

    forward: int = 0
    backward: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    ranks: int = 0

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


def sum_of(found: Iterable[TensorReductions | None]) -> TensorReductions | None:
    """The reductions of several operators together; None if none has any."""
    each = [one for one in found if one is not None]
    if not each:
        return None
    return TensorReductions(
        sum(one.forward for one in each),
        sum(one.backward for one in each),
        sum(one.forward_bytes for one in each),
        sum(one.backward_bytes for one in each),
        sum(one.forward_s for one in each),
        sum(one.backward_s for one in each),
        each[0].ranks,
    )
