"""The FLOPs and bytes of one call of an operator: a kernel on the device."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..capture.graph.nodes import written_tensors
from ..capture.values.nesting import tensors_of
from .attention import BACKWARD, FORWARD, attention_flops
from .kinds import kind_of, operator_name
from .shapes import Product, Scores, Shape

aten = torch.ops.aten

_NUMBER_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.complex64: "fp32", torch.complex128: "fp64",
}  # fmt: skip


@frozen
class Kernel:
    """One call of an operator.

    Args:
        name: name of the operator.
        kind: one of the kinds for which a device type has efficiencies.
        dtype: the number type of its computation.
        flops: floating-point operations that matrix products, attention and convolutions execute; 0 for all other
            operators, which are memory-bound.
        counted_flops: the FLOPs by the usual formulas for model-FLOPs utilisation, see `attention_flops`.
        read_bytes, written_bytes: of tensors in memory, each element once.
        shape: of a matrix product or attention, where its FLOPs have one.
    """

    name: str
    kind: str
    dtype: str
    flops: int
    counted_flops: int
    read_bytes: int
    written_bytes: int
    shape: Shape | None = None

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements: an expanded dimension has one."""
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(prod(sizes)) * tensor.dtype.itemsize if tensor.numel() else 0


def kernel_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Kernel | None:
    """The kernel of one call.

    Args:
        args, kwargs: its arguments; tensors may be fake.

    Returns:
        None for a call without a kernel: a view, a memory allocation, a number.
    """
    name = operator_name(target)
    written = written_tensors(target, args, kwargs)
    given = tensors_of((args, kwargs))
    known = {tensor.untyped_storage()._cdata for tensor in given}
    made = [t for t in tensors_of(result) if t.untyped_storage()._cdata not in known]
    if not (made or written) or name.startswith(_ALLOCATIONS):
        return None
    flops, counted = _flops(target, name, args, kwargs, result)
    return Kernel(
        name, kind_of(target), _number_type(given or made), flops, counted,
        _read_bytes(name, args, given, made), sum(map(touched_bytes, _distinct([*made, *written]))),
        _shape(target, name, args) if flops else None,
    )  # fmt: skip


_ALLOCATIONS = ("empty", "new_empty", "_assert", "sym_")
_READ_NOTHING = {
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like", "bernoulli",
    "uniform", "normal", "exponential", "integers", "permutation", "fill", "zero_", "fill_",
}  # fmt: skip


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors without those that are the same view of the same storage as an earlier one."""
    found: dict[Any, Tensor] = {}
    for tensor in tensors:
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        found.setdefault(key, tensor)
    return list(found.values())


def _read_bytes(name: str, args: Sequence[Any], given: list[Tensor], made: list[Tensor]) -> int:
    if name in _READ_NOTHING:
        return 0
    if name in _LOOKUPS and isinstance(args[0], Tensor):  # as many elements as the result has, and the indices
        places = [t for t in given if t is not args[0]]
        return sum(map(touched_bytes, _distinct(places))) + sum(t.numel() * t.dtype.itemsize for t in made)
    if name in ("nll_loss_forward", "nll_loss2d_forward"):  # one element of each row
        return touched_bytes(args[1]) + int(args[1].numel() * args[0].dtype.itemsize)
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        return touched_bytes(args[0]) + touched_bytes(args[2])
    if name == "convolution_backward":
        wanted = [args[0], *([args[2]] if args[-1][0] else []), *([args[1]] if args[-1][1] else [])]
        return sum(map(touched_bytes, wanted))
    return sum(map(touched_bytes, _distinct(given)))


_LOOKUPS = {"embedding", "index", "index_select", "gather", "take", "_unsafe_index", "_unsafe_masked_index"}


def _shape(target: Any, name: str, args: Sequence[Any]) -> Shape | None:
    """The shape of a product of two matrices, of a batch of them, or of attention."""
    if target in (FORWARD, BACKWARD):
        query, key, value = args[0:3] if target is FORWARD else args[1:4]
        batch, heads, rows, _ = query.shape
        causal = bool(args[4] if target is FORWARD else args[7])
        keys = touched_bytes(key) + touched_bytes(value)
        return Scores(batch * heads, rows, key.shape[-2], causal, target is BACKWARD, keys)
    factors = [t for t in args[_FIRST_FACTOR.get(name, len(args)) :][:2] if isinstance(t, Tensor)]
    if len(factors) != 2 or not all(t.ndim in (2, 3) for t in factors):
        return None
    a, b = factors
    batch = a.shape[0] if a.ndim == 3 else 1
    return Product(batch, a.shape[-2], b.shape[-1], a.shape[-1], a.dtype.itemsize)


_FIRST_FACTOR = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}
"""The position of the first factor in the arguments of each product."""


def _flops(target: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    if target is FORWARD:
        return attention_flops(args[0], args[1], args[2], bool(args[4]), backward=False)
    if target is BACKWARD:
        return attention_flops(args[1], args[2], args[3], bool(args[7]), backward=True)
    if name == "convolution_backward":
        # Each of the two gradients multiplies the same pairs of elements as the forward; a bias has no products.
        flops = sum(args[-1][:2]) * _convolution_flops(args[1], args[2], args[0], bool(args[7]))
    elif "convolution" in name and len(args) > 6:
        flops = _convolution_flops(args[0], args[1], tensors_of(result)[0], bool(args[6]))
    else:
        formula = flop_registry.get(getattr(target, "overloadpacket", None))
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    return flops, flops


def _convolution_flops(x: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    """A multiplication and an addition for each element of the result (of ``x``, if transposed) and of its filter."""
    return int(2 * (x if transposed else result).numel() * prod(weight.shape[1:]))


def _number_type(tensors: Sequence[Tensor]) -> str:
    return next((_NUMBER_TYPES[t.dtype] for t in tensors if t.dtype in _NUMBER_TYPES), "fp32")
