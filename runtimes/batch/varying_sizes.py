"""Sizes that differ between batches, and what is captured for all of them.

The first batch is captured with its sizes. At the second one, the dimensions that differ become symbols, and the step
is captured once more; from then on a new size costs no capture: the programs get numbers in place of symbols. What the
user declares (``dynamic=``) has symbols from the start. A step that decides by a size, such as ``if length > 128``, has
guards, and is captured again for sizes beyond them.
"""

from collections.abc import Hashable, Mapping, Sequence

from attrs import define, field, frozen

from ...core.capture.export.operators import Operators
from ...core.errors import RequestError
from ..microbatches import Shape

_INNER = 2
"""The first dimension after those of samples, and of tokens or channels."""
Dims = Mapping[int, Sequence[int]]
"""Position of a tensor among the batch's leaves → some of its dimensions."""


@frozen
class Captures:
    """Captures of a function with symbolic sizes, for batches that differ only in sizes; valid for every plan."""

    steps: list[Operators] = field(factory=list)
    failures: list[str] = field(factory=list)


def structure_of(shape: Shape) -> Hashable:
    """What shapes have in common that differ only in sizes: dtypes, numbers of dimensions, and plain values."""
    leaves = (((len(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf) for leaf in shape.leaves)
    return shape.nesting, shape.dims, tuple(leaves)


def sizes_of(shape: Shape) -> dict[int, tuple[int, ...]]:
    """Position of each tensor among the batch's leaves → its shape."""
    return {i: leaf[0] for i, leaf in enumerate(shape.leaves) if isinstance(leaf, tuple)}


@define
class VaryingSizes:
    """The dimensions whose sizes differ between batches, by structure.

    Args:
        declared: name of a tensor → dimension → its largest size; None for any.

    Attributes:
        capture_s: seconds of all captures, and of all derivations of programs with symbolic sizes.
    """

    declared: Mapping[str, Mapping[int, int | None]] = field(factory=dict)
    capture_s: float = 0.0
    _first: dict[Hashable, dict[int, tuple[int, ...]]] = field(factory=dict)
    _dims: dict[Hashable, set[tuple[int, int]]] = field(factory=dict)
    _captures: dict[Hashable, Captures] = field(factory=dict)

    def note(self, shape: Shape) -> None:
        """Note the sizes of a microbatch.

        Raises:
            RequestError: a size is larger than declared.
        """
        structure, sizes = structure_of(shape), sizes_of(shape)
        for leaf, name in enumerate(shape.nesting.names):
            for dim, most in self.declared.get(name, {}).items():
                if most is not None and leaf in sizes and sizes[leaf][dim] > most:
                    raise RequestError(
                        f"{name} has {sizes[leaf][dim]} entries in dimension {dim}, and dynamic= declares at most "
                        f"{most}, for which memory is planned: truncate the batch, or declare a larger size"
                    )
        first, found = self._first.setdefault(structure, sizes), self._dims.setdefault(structure, set())
        for leaf, own in sizes.items():
            other = {dim for dim, size in enumerate(own) if size != first[leaf][dim]}
            if any(dim >= _INNER for dim in other):  # the width of pictures probably varies, too, if the height does
                other.update(range(_INNER, len(own)))
            found.update((leaf, dim) for dim in other)

    def of(self, shape: Shape) -> Dims:
        """The dimensions of a microbatch that become symbols; a symbol is at least 2."""
        found: dict[int, list[int]] = {}
        sizes, names = sizes_of(shape), shape.nesting.names
        declared = {(leaf, dim) for leaf in sizes for dim in self.declared.get(names[leaf], ())}
        for leaf, dim in sorted(declared.union(self._dims.get(structure_of(shape), ()))):
            if sizes[leaf][dim] > 1:
                found.setdefault(leaf, []).append(dim)
        return found

    def captures(self, function: Hashable, shape: Shape) -> Captures:
        """The captures of a function with symbolic sizes for batches with the structure of this one.

        Args:
            function: what is captured: the function, the Python values that it reads, and the modes of its modules.
        """
        return self._captures.setdefault((function, structure_of(shape)), Captures())
