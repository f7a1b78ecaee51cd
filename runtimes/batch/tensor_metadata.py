"""Functions of tensors that need none of their values, for classes of tensors that have a shape but no values here."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Tensor)
_METADATA = (
    "_base", "_cdata", "_backward_hooks", "_is_param", "_is_view", "_python_dispatch", "_version", "device", "dtype",
    "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps",
    "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize",
    "layout", "name", "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
"""Attributes with metadata of a tensor, which need none of its values."""
_METHODS = (
    "__hash__", "__len__", "dim", "dim_order", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_conj", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_same_size",
    "is_shared", "is_signed", "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset", "stride",
)  # fmt: skip
"""Methods with metadata of a tensor."""


def _getters(names: Iterable[str]) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(getattr(Tensor, name, None), "__get__")}


METADATA_FUNCTIONS: set[Any] = {
    *_getters(_METADATA),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
    torch.is_complex, torch.is_floating_point, torch.is_signed, torch.numel, torch.is_same_size,
}  # fmt: skip
"""What ``__torch_function__`` gets where metadata alone is read."""


def name_of(func: Callable[..., Any]) -> str:
    """The name of what ``__torch_function__`` gets: of an attribute its own, not that of its getter."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def first_of(kind: type[_T], given: Any) -> _T | None:
    """The first tensor of a class among the arguments of a function."""
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        given = given.values()
    if isinstance(given, str | bytes | Tensor) or not isinstance(given, Iterable):
        return None
    return next((found for each in given if (found := first_of(kind, each)) is not None), None)
