"""Kernels and collectives of transformer layers on one GPU, as Megatron-LM and FSDP run them: what published runs need.

A layer is split over t GPUs as Megatron does (arXiv 1909.08053): the matrices that read the hidden state by columns,
those that write it by rows. With sequence parallelism (arXiv 2205.05198) the parts between them are split by tokens.
A kernel's time is the cost model's (``panpipe.core.analytic``), a collective's the cluster's.
"""

from collections.abc import Iterable

from attrs import field, frozen
from panpipe.core.analytic.kernels import Kernel
from panpipe.core.analytic.shapes import Product, Scores

HALF, SINGLE = 2, 4
"""Bytes of bf16 or fp16, and of fp32."""


@frozen
class Model:
    """A decoder. ``inner`` is the width of its feed-forward part; ``gated`` where that multiplies two branches."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    key_heads: int = 0
    inner: int = 0
    gated: bool = False
    dropout: bool = False
    rotary: bool = False
    flash: bool = False
    biases: bool = True

    @property
    def width(self) -> int:
        return self.inner or 4 * self.hidden

    @property
    def projected(self) -> int:
        """Columns of queries, keys and values."""
        return self.hidden + 2 * self.hidden * (self.key_heads or self.heads) // self.heads

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (self.projected + self.hidden + self.width * (3 if self.gated else 2))

    @property
    def flops_per_token(self) -> int:
        """Of F and B by the usual formula: 6 for each parameter of a product, and whole attention."""
        products = self.layers * self.layer_parameters + self.hidden * self.vocabulary
        return 6 * products + 12 * self.layers * self.sequence * self.hidden


@frozen
class Sharding:
    """How a layer runs: samples of a microbatch, GPUs of a tensor-parallel group, and Megatron's options.

    Args:
        samples: of a microbatch.
        tensor: GPUs that share a layer.
        by_tokens: sequence parallelism.
        fused_sums: products add weight gradients to those of earlier microbatches themselves.
        sum_bytes: of a number of the summed weight gradients.
    """

    samples: int
    tensor: int = 1
    by_tokens: bool = False
    fused_sums: bool = True
    sum_bytes: int = SINGLE


@frozen
class Collective:
    """A collective over the tensor-parallel group: bytes of the whole tensor, and the kernels that it overlaps."""

    operation: str
    bytes: float
    during: tuple[Kernel, ...] = ()


@frozen
class Part:
    """Kernels and collectives of one pass."""

    kernels: tuple[Kernel, ...] = field(converter=tuple)
    collectives: tuple[Collective, ...] = field(converter=tuple, default=())

    def __add__(self, other: "Part") -> "Part":
        return Part(self.kernels + other.kernels, self.collectives + other.collectives)

    def times(self, count: int) -> "Part":
        return Part(self.kernels * count, self.collectives * count)


def product(rows: int, columns: int, inner: int, batch: int = 1, extra_bytes: int = 0) -> Kernel:
    """A matrix product in 16 bits; ``extra_bytes`` of each element of the result are read, and written, in addition."""
    flops = 2 * batch * rows * columns * inner
    read = HALF * batch * (rows * inner + inner * columns) + extra_bytes * batch * rows * columns
    written = (extra_bytes or HALF) * batch * rows * columns
    return Kernel("mm", "matmul", "bf16", flops, flops, read, written, Product(batch, rows, columns, inner))


def moved(kind: str, read: float, written: float) -> Kernel:
    """A memory-bound kernel."""
    return Kernel(kind, kind, "bf16", 0, 0, int(read), int(written))


def layer(model: Model, how: Sharding) -> tuple[Part, Part, Part]:
    """F of a layer, its B, and the recomputation of attention alone (selective recomputation)."""
    tokens, h, t = how.samples * model.sequence, model.hidden, how.tensor
    near = tokens // t if how.by_tokens else tokens
    state = HALF * tokens * h
    split = ("all-gather", "reduce-scatter") if how.by_tokens else (None, "all-reduce")
    columns, width = model.projected // t, model.width // t
    up = width * (2 if model.gated else 1)
    attention, attention_back = _attention(model, how)
    linears = [(columns, h), (h, h // t), (up, h), (h, width)]  # columns and inner dimension of each
    norm = moved("normalisation", HALF * near * h, HALF * near * h)
    mask = near * h if model.dropout else 0
    residual = moved("elementwise", 2 * HALF * near * h, HALF * near * h + mask)
    activation = moved("elementwise", HALF * tokens * up, HALF * tokens * width)
    rotate = [moved("elementwise", HALF * tokens * columns, HALF * tokens * columns)] if model.rotary else []
    products = [product(tokens, columns, inner) for columns, inner in linears]
    forward = [norm, products[0], *rotate, *attention, products[1], residual, norm, products[2], activation,
               products[3], residual]  # fmt: skip
    enter, leave = split
    gathers = [Collective(enter, state)] * 2 if enter and t > 1 else []
    sums = [Collective(leave, state)] * 2 if t > 1 else []
    backward: list[Kernel] = [*rotate, *attention_back]
    exposed: list[Collective] = []
    for position, (columns, inner) in enumerate(linears):
        to_input = product(tokens, inner, columns)
        to_weight = product(columns, inner, tokens, extra_bytes=how.sum_bytes if how.fused_sums else 0)
        backward += [to_input, to_weight]
        if not how.fused_sums:
            size = columns * inner
            backward.append(moved("elementwise", (HALF + how.sum_bytes) * size, how.sum_bytes * size))
        if model.biases:
            backward.append(moved("normalisation", HALF * tokens * columns, 0))
        if t > 1 and position in (0, 2):  # reads the hidden state: its collectives overlap these products
            if enter:
                exposed.append(Collective(enter, state, (to_input,)))
            exposed.append(Collective(leave, state, (to_weight,)))
        elif t > 1 and enter:
            exposed.append(Collective(enter, state))
    backward += [
        *[moved("normalisation", 2 * HALF * near * h, HALF * near * h)] * 2,
        *[moved("normalisation", 2 * HALF * near * h, 0)] * 2,  # gradients of the norms' own parameters
        *[moved("elementwise", 2 * HALF * near * h + mask, HALF * near * h)] * 2,
        moved("elementwise", HALF * tokens * (up + width), HALF * tokens * up),
    ]
    return Part(forward, [*gathers, *sums]), Part(backward, exposed), Part(attention)


def _attention(model: Model, how: Sharding) -> tuple[list[Kernel], list[Kernel]]:
    heads, size, rows = how.samples * model.heads // how.tensor, model.hidden // model.heads, model.sequence
    if model.flash:
        return [_flash(heads, rows, size, False)], [_flash(heads, rows, size, True)]
    scores = HALF * heads * rows * rows
    mask = scores // HALF if model.dropout else 0
    moves = moved("elementwise", HALF * heads * rows * size, HALF * heads * rows * size)
    into, out_of = product(rows, rows, size, heads), product(rows, size, rows, heads)
    softmax = moved("normalisation", scores, scores)
    dropout = [moved("elementwise", scores, scores + mask)] if model.dropout else []
    back = [moved("elementwise", scores + mask, scores)] if model.dropout else []
    return (
        [into, softmax, *dropout, out_of, moves],
        [moves, into, out_of, *back, moved("normalisation", 2 * scores, scores), out_of, out_of],
    )


def _flash(heads: int, rows: int, size: int, backward: bool) -> Kernel:
    """Causal: half of the scores. The backward has five products where the forward has two."""
    done = heads * rows * (rows + 1) // 2
    flops = (10 if backward else 4) * done * size
    tensors = HALF * heads * rows * size
    read, written = (5, 3) if backward else (3, 1)
    return Kernel("attention", "attention", "bf16", flops, flops, read * tensors, written * tensors,
                  Scores(heads, rows, rows, True, backward))  # fmt: skip


def head(model: Model, how: Sharding) -> tuple[Part, Part]:
    """F and B of the last norm, the projection to the vocabulary, and the cross-entropy in fp32."""
    tokens, columns = how.samples * model.sequence, model.vocabulary // how.tensor
    logits = tokens * columns
    state = HALF * tokens * model.hidden
    gathered = [Collective("all-gather", state)] if how.by_tokens and how.tensor > 1 else []
    summed = [Collective("reduce-scatter" if how.by_tokens else "all-reduce", state)] if how.tensor > 1 else []
    norm = moved("normalisation", state, state)
    forward = [norm, product(tokens, columns, model.hidden), moved("elementwise", HALF * logits, SINGLE * logits),
               moved("normalisation", SINGLE * logits, 0), moved("normalisation", SINGLE * logits, SINGLE * logits),
               moved("normalisation", SINGLE * logits, 0)]  # fmt: skip
    backward = [moved("elementwise", SINGLE * logits, SINGLE * logits),
                moved("elementwise", SINGLE * logits, HALF * logits), product(tokens, model.hidden, columns),
                product(columns, model.hidden, tokens, extra_bytes=how.sum_bytes), norm]  # fmt: skip
    return Part(forward, gathered), Part(backward, [*gathered, *summed])


def embedding(model: Model, how: Sharding) -> tuple[Part, Part]:
    """F and B of the lookup."""
    tokens = how.samples * model.sequence
    state = HALF * tokens * model.hidden
    summed = [Collective("reduce-scatter" if how.by_tokens else "all-reduce", state)] if how.tensor > 1 else []
    gathered = [Collective("all-gather", state)] if how.by_tokens and how.tensor > 1 else []
    return Part([moved("gather", state, state)], summed), Part([moved("gather", 2 * state, state)], gathered)


def by_kind(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by the term that reports them."""
    found: dict[str, list[Kernel]] = {"matmul": [], "attention": [], "bandwidth-bound": []}
    for kernel in kernels:
        found[kernel.kind if kernel.kind in found else "bandwidth-bound"].append(kernel)
    return found
