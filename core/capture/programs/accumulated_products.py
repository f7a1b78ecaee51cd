"""Gradients that are matrix products: the kernel of the product adds them to the sum, without an intermediate tensor.

The gradient of a linear layer's weight is a product, possibly transposed. A program passes its two factors to its sink,
and the kernel of the product adds it to the sum without an intermediate tensor. That saves 4 to 7 % of the time of
product and sum for 512 × 1024 × 256 (float32, one core, operands in the cache), and the intermediate tensor's memory.

Under autocast the factors have 16 bits and the gradient 32. CUDA has kernels that multiply such factors into a sum in
float32: nothing is rounded to 16 bits in between, and no gradient of 16 bits is allocated. A CPU has none (torch 2.13:
``addmm.dtype`` is for CUDA), so there the product is computed, cast and added, as in eager PyTorch. If the gradient
itself has 16 bits, its product is not accumulated in the kernel: eager PyTorch rounds before it adds.
"""

import functools
from collections.abc import Collection, Sequence

import torch
from attrs import frozen
from torch import Tensor, fx

aten = torch.ops.aten

_WIDE, _NARROW = {torch.float32, torch.float64}, {torch.bfloat16, torch.float16}


@frozen
class Product:
    """A value for the sink of a program that is a product of two matrices.

    Args:
        number: its position among the values for the sink.
        node: the product.
        flips: transpositions and casts between the product and the value.
    """

    number: int
    node: fx.Node
    flips: tuple[fx.Node, ...]

    @property
    def casts(self) -> list[fx.Node]:
        """The casts among ``flips``; a group of operators that run as one may contain them."""
        return [flip for flip in self.flips if flip.target is not aten.t.default]

    @property
    def transposed(self) -> bool:
        """Whether the value is the transpose of the product."""
        return sum(flip.target is aten.t.default for flip in self.flips) % 2 == 1


def products_of(
    for_sink: Sequence[fx.Node], nodes: Collection[fx.Node], outputs: Collection[fx.Node | None]
) -> list[Product]:
    """The products among the values that a program passes to its sink, if the program does not read them itself.

    Args:
        for_sink: the values, by number.
        nodes: of the program.
        outputs: nodes that it returns.
    """
    inside, returned = set(nodes), set(outputs)
    found = []
    for number, value in enumerate(for_sink):
        node, flips = value, list[fx.Node]()
        while node in inside and (node.target is aten.t.default or _is_accumulated_cast(node)):
            flips.append(node)
            node = node.args[0]  # type: ignore[assignment]
        chain = [node, *reversed(flips)]
        if (
            node in inside
            and node.target is aten.mm.default
            and (node.meta["val"].dtype in _WIDE or node.meta["val"].dtype is not value.meta["val"].dtype)
            and for_sink.count(value) == 1
            and not any(one in returned for one in chain)
            and not any(one in for_sink for one in chain[:-1])
            and all(_read_once(one, inside) for one in chain[:-1])
            and not any(user in inside for user in value.users)
        ):
            found.append(Product(number, node, tuple(flips)))
    return found


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of two matrices to a tensor in one operator; the factors may have 16 bits where the tensor has 32.

    Args:
        total: the sum.
        left, right: the factors.
    """
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def first_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Write a product of two matrices to a tensor; the factors may have 16 bits where the tensor has 32."""
    if left.dtype is total.dtype:
        return torch.mm(left, right, out=total)
    return aten.mm.dtype_out(left, right, total.dtype, out=total)  # type: ignore[no-any-return]


_library = torch.library.Library("panpipe", "FRAGMENT")
_library.define("add_wide_product(Tensor(a!) total, Tensor left, Tensor right) -> ()")
_library.impl("add_wide_product", accumulate_product, "CompositeExplicitAutograd")
torch.library.register_fake("panpipe::add_wide_product", lambda total, left, right: None, lib=_library)
add_wide_product = torch.ops.panpipe.add_wide_product.default
"""`accumulate_product` for factors of 16 bits, as an operator in graphs that a compiler gets."""


def _is_accumulated_cast(node: fx.Node) -> bool:
    """Whether a node casts from 16 bits to float32, on a device that accumulates products of 16 bits in float32."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    given: Tensor = node.all_input_nodes[0].meta["val"]
    return (
        node.kwargs["dtype"] is torch.float32
        and given.dtype in _NARROW
        and accumulates_in_float32(given.device, given.dtype)
    )


@functools.cache
def accumulates_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies matrices of a dtype of 16 bits into a sum in float32: found by doing it once."""
    if device.type == "cpu" or not hasattr(aten.addmm, "dtype_out"):
        return False
    try:
        left, right = (torch.full((16, 16), value, dtype=dtype, device=device) for value in (1.0, 1 / 3))
        total = torch.ones(16, 16, device=device)
        accumulate_product(total, left, right)
        wanted = 1 + left.float() @ right.float()
        written = first_product(torch.empty_like(total), left.t(), right)
        return bool(torch.allclose(total, wanted, rtol=1e-6) and torch.allclose(written, wanted - 1, rtol=1e-6))
    except (RuntimeError, NotImplementedError):
        return False


def _read_once(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    return sum(user in inside for user in node.users) == 1
