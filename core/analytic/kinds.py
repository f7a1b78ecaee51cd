"""The kind of an operator, which selects the device's efficiency for it."""

from typing import Any

MATMUL, ATTENTION, CONVOLUTION = "matmul", "attention", "convolution"
NORMALISATION, ELEMENTWISE, GATHER = "normalisation", "elementwise", "gather"

EAGER, COMPILED, FUSED = "eager", "compiled", "fused"
KERNELS = (EAGER, COMPILED, FUSED)
"""How the kernels of a step are written, see ``fusion``."""
ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"
ORDERS = (ZIGZAG, CONTIGUOUS)
"""Which tokens of a sample a context rank has, see ``context``."""

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot", "vdot", "addbmm"}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_REDUCTIONS = {
    "sum", "mean", "var", "var_mean", "std", "std_mean", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin",
    "prod", "any", "all", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "logcumsumexp",
    "count_nonzero",
}  # fmt: skip
_GATHERS = {
    "embedding", "embedding_dense_backward", "index", "index_select", "gather", "take", "index_put", "_index_put_impl",
    "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "index_add",
    "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce", "put", "masked_select", "masked_scatter",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_embedding_bag",
    "_embedding_bag_dense_backward", "topk", "sort", "searchsorted", "bucketize", "unique_consecutive", "nonzero",
}  # fmt: skip


def kind_of(target: Any) -> str:
    """The kind of an overload of an operator.

    Row reductions and softmax count as normalisations: all of them read rows, reduce them and write at most as much.
    """
    name = operator_name(target)
    plain = name.removesuffix("_")
    if plain in _MATMULS or name.removesuffix("_backward") in _RECURRENT:
        return MATMUL
    if name.startswith(_ATTENTION) or name in ("fused_attention", "fused_attention_backward"):
        return ATTENTION
    if "convolution" in name or name.startswith(("_slow_conv", "conv_")):
        return CONVOLUTION
    if plain in _REDUCTIONS or "softmax" in name or "_norm" in name or name.endswith("_norm_backward"):
        return NORMALISATION
    return GATHER if plain in _GATHERS else ELEMENTWISE


def operator_name(target: Any) -> str:
    """The name of an overload without namespace and overload, such as ``addmm``."""
    schema = getattr(target, "_schema", None)
    return str(schema.name).split("::")[-1] if schema is not None else str(getattr(target, "__name__", target))
