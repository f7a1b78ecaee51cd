"""Gradients that are matrix products, which are accumulated by the product's kernel instead of after it.

The gradient of a linear layer's weight is a product, possibly transposed. The program hands over its two factors, and
the kernel of the product adds it to the sum without an intermediate tensor. That saves 4 to 7 % of the time of product
and sum for 512 × 1024 × 256 (float32, one core, operands in the cache), and the intermediate tensor's memory.

Products in 16 bits are not accumulated in the kernel: it rounds once, and eager PyTorch also rounds before it adds.
"""

from collections.abc import Collection, Sequence

import torch
from attrs import frozen
from torch import fx

aten = torch.ops.aten

_WIDE = {torch.float32, torch.float64}


@frozen
class Product:
    """A handed over value that is a product of two matrices.

    Args:
        number: its position among the values that are handed over.
        node: the product.
        flips: transpositions between the product and the value.
    """

    number: int
    node: fx.Node
    flips: tuple[fx.Node, ...]

    @property
    def transposed(self) -> bool:
        """Whether the value is the transpose of the product."""
        return len(self.flips) % 2 == 1


def products_of(
    handed_over: Sequence[fx.Node], nodes: Collection[fx.Node], outputs: Collection[fx.Node | None]
) -> list[Product]:
    """The products among the values that a program hands over, if the program does not read them itself.

    Args:
        handed_over: the values, by number.
        nodes: of the program.
        outputs: nodes that it returns.
    """
    inside, returned = set(nodes), set(outputs)
    found = []
    for number, value in enumerate(handed_over):
        node, flips = value, list[fx.Node]()
        while node in inside and node.target is aten.t.default:
            flips.append(node)
            node = node.args[0]  # type: ignore[assignment]
        chain = [node, *reversed(flips)]
        if (
            node in inside
            and node.target is aten.mm.default
            and node.meta["val"].dtype in _WIDE
            and handed_over.count(value) == 1
            and not any(one in returned for one in chain)
            and not any(one in handed_over for one in chain[:-1])
            and all(_read_once(one, inside) for one in chain[:-1])
            and not any(user in inside for user in value.users)
        ):
            found.append(Product(number, node, tuple(flips)))
    return found


def _read_once(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    return sum(user in inside for user in node.users) == 1
