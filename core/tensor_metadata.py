"""Functions of tensors that read metadata and no values, for tensors that have a shape but no values here."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Tensor)
_PROPERTIES = (
    "_base", "_cdata", "_backward_hooks", "_grad_fn", "_has_symbolic_sizes_strides", "_is_param", "_is_view",
    "_post_accumulate_grad_hooks", "_python_dispatch", "_version", "device", "dtype", "grad_dtype", "grad_fn", "is_cpu",
    "is_cuda", "is_ipu", "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "nbytes",
    "ndim", "output_nr", "requires_grad", "retains_grad", "shape", "volatile",
)  # fmt: skip
"""Properties of a tensor that are metadata; the others, such as ``T``, ``data`` and ``grad``, are tensors."""
_METHODS = (
    "__hash__", "__len__", "dim", "dim_order", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_conj", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_same_size",
    "is_shared", "is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
)  # fmt: skip
"""Methods of a tensor that return metadata."""


METADATA_PROPERTIES: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(getattr(Tensor, name, None), "__get__")
)
"""What ``__torch_function__`` gets where a property is read that is metadata."""

METADATA_READS: frozenset[Any] = METADATA_PROPERTIES.union(
    (getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
    (torch.is_complex, torch.is_floating_point, torch.is_signed, torch.numel, torch.is_same_size),
)
"""What it gets where metadata alone is read, by a property or a function."""

METADATA_FUNCTIONS: frozenset[Any] = METADATA_READS.union(
    (
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        Tensor.requires_grad_,
    )
)
"""What it gets where metadata alone is read or written."""


def name_of(func: Callable[..., Any]) -> str:
    """The name of what ``__torch_function__`` gets: of a property its own, not that of its getter."""
    name: str = getattr(func, "__name__", type(func).__name__)
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


def storage_of(tensor: Tensor) -> int | None:
    """Identity of a tensor's storage; None if it has none: sparse tensors, and those of `torch.vmap`."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None
    return found


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory; the tensor's own if it has no storage, as a sparse tensor."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage


def state_of(tensor: Tensor) -> tuple[int, int | None]:
    """A tensor's version and storage: they change when it is written in place or its data are replaced."""
    return tensor._version, storage_of(tensor)
