"""Sizes that differ between batches, and programs for all of them.

The first batch is captured with its sizes. At the second one, the dimensions that differ become symbols, and the step
is captured once more; from then on a new size costs no capture: the programs get numbers in place of symbols. A step
that decides by a size, such as ``if length > 128``, has guards, and is captured again for sizes beyond them.
"""

from collections.abc import Hashable, Mapping, Sequence

from attrs import define, field, frozen

from ..programs.compiled import Compiled
from .microbatches import Shape

Dims = Mapping[int, Sequence[int]]
"""Position of a tensor among the batch's leaves → some of its dimensions."""


def structure_of(shape: Shape) -> Hashable:
    """What shapes have in common that differ only in sizes: dtypes, numbers of dimensions, and plain values."""
    leaves = (((len(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf) for leaf in shape.leaves)
    return shape.nesting, shape.dims, tuple(leaves)


def sizes_of(shape: Shape) -> dict[int, tuple[int, ...]]:
    """Position of each tensor among the batch's leaves → its shape."""
    return {i: leaf[0] for i, leaf in enumerate(shape.leaves) if isinstance(leaf, tuple)}


@define
class VaryingSizes:
    """The dimensions whose sizes differ between batches, by structure."""

    _first: dict[Hashable, dict[int, tuple[int, ...]]] = field(factory=dict)
    _dims: dict[Hashable, set[tuple[int, int]]] = field(factory=dict)

    def note(self, shape: Shape) -> None:
        """Note the sizes of a microbatch."""
        structure, sizes = structure_of(shape), sizes_of(shape)
        first = self._first.setdefault(structure, sizes)
        self._dims.setdefault(structure, set()).update(
            (leaf, dim) for leaf, own in sizes.items() for dim, size in enumerate(own) if size != first[leaf][dim]
        )

    def of(self, shape: Shape) -> Dims:
        """The dimensions of a microbatch that become symbols; a symbol is at least 2."""
        found: dict[int, list[int]] = {}
        sizes = sizes_of(shape)
        for leaf, dim in sorted(self._dims.get(structure_of(shape), ())):
            if sizes[leaf][dim] > 1:
                found.setdefault(leaf, []).append(dim)
        return found


@frozen
class SymbolicPrograms:
    """Programs with symbolic sizes.

    Args:
        compiled: the programs.
        structure: of the microbatches.
    """

    compiled: Compiled
    structure: Hashable

    @property
    def fixed(self) -> bool:
        """Whether they are valid for one shape alone."""
        symbols = self.compiled.operators.step.sizes
        return symbols is None or symbols.fixed

    def at(self, shape: Shape) -> Compiled | None:
        """The programs for a microbatch; None if they are not valid for its sizes."""
        symbols = self.compiled.operators.step.sizes
        sizes = (
            symbols.values(sizes_of(shape)) if symbols is not None and structure_of(shape) == self.structure else None
        )
        return None if sizes is None else self.compiled.with_sizes(sizes)
