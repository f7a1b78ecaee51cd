"""Operators of ATen by how they treat the rows of their inputs."""

COPIES = {
    "alias", "clone", "contiguous", "copy", "copy_", "detach", "detach_", "lift_fresh", "lift_fresh_copy", "_to_copy",
    "to", "_reshape_alias", "_unsafe_view", "expand_copy", "view_copy", "resolve_conj", "resolve_neg", "positive",
    "repeat", "tile", "cat", "stack", "set_", "resize_", "as_strided", "requires_grad_",
}  # fmt: skip
"""Return their input, in another layout or type, or repeated."""

NUMBERS_ROWS = {"arange", "linspace", "range"}
"""Return row numbers."""

NEW = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_empty_strided", "zero_", "fill_", "normal_", "uniform_", "random_",
    "exponential_", "bernoulli", "bernoulli_", "native_dropout", "dropout", "_fused_dropout", "normal", "poisson",
}  # fmt: skip
"""Return values that do not depend on the input's, or elementwise only."""

REDUCTIONS = {
    "sum", "mean", "amax", "amin", "aminmax", "any", "all", "prod", "std", "var", "var_mean", "std_mean", "argmax",
    "argmin", "max", "min", "logsumexp", "norm", "linalg_vector_norm", "count_nonzero", "median", "nanmedian",
    "nansum", "nanmean", "trace", "histc", "bincount",
}  # fmt: skip
"""Reduce some dimensions."""

LOSSES = {
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward", "nll_loss2d_forward",
    "soft_margin_loss", "multilabel_margin_loss_forward", "multi_margin_loss", "_ctc_loss",
    "binary_cross_entropy_with_logits",
}  # fmt: skip
"""Return one number for all samples, or one for each."""

SUMS = {"sum", "mean", "add", "sub", "neg", "mul", "div", "rsub", "stack", "cat", "add_", "sub_", "mul_", "div_"}
"""Return a term that is summed over samples, from such terms."""

PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, None), "vdot": (0, 1),
             "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "_addmm_activation": (1, 2),
             "matmul": (0, 1), "_grouped_mm": (0, 1)}  # fmt: skip
"""Matrix products → positions of the two arguments; None for a weight."""

ALONG = {
    "softmax", "_softmax", "_log_softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "flip", "roll", "sort", "topk", "argsort", "kthvalue", "mode", "cumsum_", "renorm", "diff", "glu",
    "unique_dim", "unique_consecutive", "_fft_c2c", "_fft_r2c", "_fft_c2r", "median", "msort",
}  # fmt: skip
"""Depend on the other values along a dimension."""

JOINT_ALONG = {
    "softmax", "_softmax", "_log_softmax", "log_softmax", "_safe_softmax", "renorm", "sort", "topk", "argsort",
}  # fmt: skip
"""Those of ``ALONG`` that do not depend on the order along the dimension."""

SAMPLES_FIRST = (
    "native_group_norm",
    "group_norm",
    "convolution",
    "_convolution",
    "mkldnn_convolution",
    "conv",
    "im2col",
)
"""Prefixes of operators whose samples are along dimension 0."""

MATRICES = ("tril", "triu", "linalg_", "_linalg_", "cholesky", "inverse")
"""Prefixes of operators on matrices in the last two dimensions."""

BY_INDEX = {
    "gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce",
}  # fmt: skip
"""Read or write positions along a dimension that are given as indices."""

ACCUMULATING = ("scatter_add", "index_add", "scatter_reduce", "index_reduce")
"""Prefixes of those of ``BY_INDEX`` whose result does not depend on the order of what is written."""

SPATIAL = (
    "max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_pad", "replication_pad",
    "fractional_max_pool", "im2col", "col2im", "grid_sampler", "pixel_shuffle", "pixel_unshuffle", "mkldnn_max_pool",
    "quantized_max_pool", "max_unpool",
)  # fmt: skip
"""Prefixes of operators that depend on neighbours along the last dimensions."""
