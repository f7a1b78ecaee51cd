"""Ring attention over context ranks (Liu et al., arXiv 2310.01889): each rank has a part of the tokens of each sample.

A rank computes the scores of its queries with its own keys, then with those of each other rank, which are passed on in
a ring meanwhile. Of causal attention the first block is causal; the others depend on the order of the tokens::

    contiguous    rank r has part r of n             the last rank computes n − 1 whole blocks, the first none
    zigzag        rank r has parts r and 2n−1−r      every rank computes half of each block (Megatron-Core and
                  of 2n                              Transformer Engine; ring-flash-attention)

The costs are those of the slowest rank.
"""

from attrs import evolve

from ..cluster.rank_kinds import CONTEXT_RANKS
from ..costs.reductions import TensorReductions
from ..errors import RequestError
from .kernels import Kernel
from .kinds import ZIGZAG
from .model import ModelWork
from .shapes import Scores
from .work import TracedOperator

BLOCK_RATE = 0.88
"""The rate of a block with other ranks' keys, relative to one kernel for all keys: its result is added to those of the
other blocks. Fitted to published runs with 32,768 and 131,072 tokens (benchmarks/results/published_runs.md)."""


def over_context(work: ModelWork, ranks: int, order: str) -> ModelWork:
    """The work of one of some context ranks.

    Args:
        work: of a step over as many tokens as a rank has.
        order: of ``ORDERS`` in `kinds`.

    Raises:
        RequestError: no attention is one kernel, or one has other keys than those of its own tokens.
    """
    known: dict[int, TracedOperator] = {}
    operators = []
    for operator in work.operators:
        own = known.setdefault(id(operator.work), _ring(operator.work, ranks, order))
        operators.append(evolve(operator, work=own))
    if not any(one.over == CONTEXT_RANKS for each in known.values() for one in each.exchanges):
        raise RequestError(
            f"--cp {ranks} passes keys and values between kernels of attention, and the model's is written out, or it "
            "has none: leave --cp out, or attn_implementation in its config.json"
        )
    return evolve(work, operators=tuple(operators))


def _ring(work: TracedOperator, ranks: int, order: str) -> TracedOperator:
    forward, backward = (_others(kernels, ranks, order) for kernels in (work.forward, work.backward_input))
    if not forward:
        return work
    keys = sum(kernel.shape.key_bytes for kernel in work.forward if isinstance(kernel.shape, Scores))
    steps = ranks - 1
    # In the backward the gradients of keys and values are passed on with these.
    ring = TensorReductions(steps, steps, steps * keys, 2 * steps * keys, over=CONTEXT_RANKS)
    return evolve(
        work, forward=(*work.forward, *forward), backward_input=(*work.backward_input, *backward),
        exchanges=(*work.exchanges, ring),
    )  # fmt: skip


def _others(kernels: tuple[Kernel, ...], ranks: int, order: str) -> list[Kernel]:
    """The kernels of the blocks with other ranks' keys."""
    found = []
    for kernel in kernels:
        shape = kernel.shape
        if not isinstance(shape, Scores):
            continue
        if shape.rows != shape.columns:
            raise RequestError(
                f"--cp {ranks} is for attention among a sample's own tokens, and a kernel has {shape.rows} queries and "
                f"{shape.columns} keys: leave it out"
            )
        columns = max(shape.columns // 2, 1) if shape.causal and order == ZIGZAG else shape.columns
        done = (shape.rows + 1) / 2 if shape.causal else shape.rows
        block = evolve(
            kernel,
            flops=round(kernel.flops * columns / done / BLOCK_RATE),
            shape=evolve(shape, columns=columns, causal=False),
        )
        found += [block] * (ranks - 1)
    return found
