"""Attention as one fused kernel, as GPUs run it: it saves its inputs, its result and one number per row.

The CPU on which a step is captured would decompose scaled dot-product attention, or run its own kernel. A device's
costs are those of its own kernels: FlashAttention-2 (arXiv 2307.08691) and the memory-efficient kernel (arXiv
2112.05682) both save query, key, value, result and the row-wise logsumexp in float32, and recompute the scores in the
backward.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ..capture.export.operators import Operators
from ..capture.graph.nodes import root_of
from ..capture.values.nesting import tensors_of
from .kinds import operator_name

aten = torch.ops.aten

_library = torch.library.Library("panpipe_analytic", "DEF")
_library.define(
    "fused_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal) -> (Tensor, Tensor)"
)
_library.define(
    "fused_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor result, "
    "Tensor logsumexp, bool causal, bool biased) -> (Tensor, Tensor, Tensor, Tensor)"
)
FORWARD = torch.ops.panpipe_analytic.fused_attention.default
BACKWARD = torch.ops.panpipe_analytic.fused_attention_backward.default


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    # These kernels store the heads of a token next to each other.
    result = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return result, query.new_empty(batch, heads, rows, dtype=torch.float32)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    result: Tensor,
    logsumexp: Tensor,
    causal: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_gradient = torch.empty_like(bias) if biased and bias is not None else query.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias_gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bias, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bias, result, logsumexp = ctx.saved_tensors
    biased = ctx.needs_input_grad[3]
    found = torch.ops.panpipe_analytic.fused_attention_backward(
        gradient, query, key, value, bias, result, logsumexp, ctx.causal, biased
    )
    return found[0], found[1], found[2], found[3] if biased else None, None


torch.library.register_fake("panpipe_analytic::fused_attention", _forward, lib=_library)
torch.library.register_fake("panpipe_analytic::fused_attention_backward", _backward, lib=_library)
torch.library.register_autograd("panpipe_analytic::fused_attention", _differentiate, setup_context=_save, lib=_library)


def with_fused_attention(graph: fx.Graph) -> None:
    """Replace scaled dot-product attention that has batch and head dimensions by the fused kernel.

    Dropout in the kernel needs no memory: the backward generates the mask again.

    Args:
        graph: of one operator; changed in place.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.scaled_dot_product_attention.default:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
            named |= {name: value for name, value in node.kwargs.items() if name in ("attn_mask", "is_causal")}
            node.target = _fused
            node.args = (named["query"], named["key"], named["value"], named.get("attn_mask"),
                         bool(named.get("is_causal", False)))  # fmt: skip
            node.kwargs = {}


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if query.ndim != 4:  # torch has no fused kernel for it, on any device
        return aten.scaled_dot_product_attention.default(query, key, value, mask, 0.0, causal)  # type: ignore[no-any-return]
    if mask is not None and mask.dtype == torch.bool:  # torch also converts it before each call
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    result: Tensor = FORWARD(query, key, value, mask, causal)[0]
    return result


def score_products(query: Tensor, key: Tensor, causal: bool) -> int:
    """Number of pairs of query and key rows that a kernel multiplies, over batch and heads; a causal one skips half."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[-2]
    if not causal:
        return batch * heads * rows * columns
    full = max(rows - columns, 0)
    return batch * heads * (full * columns + (rows - full) * (rows - full + 1) // 2)


def attention_flops(query: Tensor, key: Tensor, value: Tensor, causal: bool, backward: bool) -> tuple[int, int]:
    """FLOPs that the kernel executes, and FLOPs by the usual formulas for utilisation.

    The kernel's backward recomputes the scores: five products, where the formulas count four. The formulas also count
    the masked half of causal attention (Zero Bubble, arXiv 2401.10241, table 1; Megatron-LM).
    """
    size, value_size = query.shape[-1], value.shape[-1]
    done, counted = score_products(query, key, causal), score_products(query, key, False)
    if not backward:
        return 2 * done * (size + value_size), 2 * counted * (size + value_size)
    return 2 * done * (3 * size + 2 * value_size), 4 * counted * (size + value_size)


_PRODUCTS = {"matmul", "bmm", "baddbmm"}


def written_out_cores(operators: Operators) -> list[tuple[str, ...]]:
    """The nodes of each attention that is written out: the product of queries and keys, then all up to what multiplies
    values.

    Nodes between have one number for each pair of a query and a key. They save about 5as²b bytes in half precision (s
    the sequence, b the samples, a the heads), which selective recomputation computes again from queries and keys
    (Korthikanti et al., arXiv 2205.05198, sections 4.1 and 5).
    """
    cores = (_core(operators, node) for node in operators.nodes.values() if _is_product(operators, node))
    return [core for core in cores if core]


def _is_product(operators: Operators, node: fx.Node) -> bool:
    """Whether a node multiplies two results of other nodes."""
    factors = [root_of(each) for each in node.all_input_nodes]
    return operator_name(node.target) in _PRODUCTS and all(each.name in operators.owner for each in factors)


def _core(operators: Operators, product: fx.Node) -> tuple[str, ...]:
    """The core that a product begins; empty if its numbers reach something else than another product."""
    pairs = operators.values[product.name].shape[-2:]
    found, todo = dict.fromkeys([product]), [product]
    while todo:
        for user in todo.pop().users:
            if user in found or _is_product(operators, user):
                continue
            values = tensors_of(operators.values.get(user.name))
            if not any(value.shape[-2:] == pairs for value in values):
                return ()
            found[user] = None
            todo.append(user)
    return tuple(node.name for node in found) if len(found) > 1 else ()
