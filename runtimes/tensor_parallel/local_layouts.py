"""Layouts of plain tensors between the modules that ``parallelize_module`` divided.

By default these modules take and return plain tensors: each rank's own part. What the user's code computes with a part
has to be the same part of what one process computes. It is not if the code takes the mean over a divided dimension, or
halves it, or computes with the number of heads of the whole model. torch computes all of these without an error::

    ColwiseParallel ──▶ part of dimension 2 ──▶ view, softmax, … : layouts are followed ──▶ RowwiseParallel
"""

import math
from collections.abc import Sequence

from attrs import evolve, frozen


@frozen
class Local:
    """What the plain tensor of one rank is.

    Args:
        part: the dimension of which each rank has a part; None if each rank has all of the tensor.
        outer: number of parts in this dimension one after another, as a view that flattens makes them: samples × part.
        same: dimensions of a whole tensor along which all values are equal.
        partial: whether the tensor is the sum over the ranks.
        known: whether the layout is known; False after operators without a rule.
    """

    part: int | None = None
    outer: int = 1
    same: frozenset[int] = frozenset()
    partial: bool = False
    known: bool = True

    @property
    def divided(self) -> bool:
        """Whether ranks hold different values."""
        return self.part is not None or self.partial


WHOLE, UNKNOWN, PARTIAL = Local(), Local(known=False), Local(partial=True)


class LayoutError(Exception):
    """The result of an operator is not the part of what one process computes."""


@frozen
class _Atom:
    """A piece of a dimension that views keep in one piece, or divide."""

    size: int
    part: bool = False
    same: bool = False
    rest: bool = False


def _atoms(shape: Sequence[int], layout: Local) -> list[_Atom]:
    found = []
    for dimension, size in enumerate(shape):
        if dimension == layout.part:
            found += [_Atom(layout.outer)] * (layout.outer > 1) + [_Atom(size // layout.outer, part=True)]
        elif size != 1:
            found.append(_Atom(size, same=dimension in layout.same))
    return found


def viewed(shape: Sequence[int], layout: Local, new: Sequence[int], divided: int | None = None) -> Local:
    """The layout after a view.

    Args:
        shape: of the rank's tensor before it.
        layout: before it.
        new: shape after it.
        divided: the dimension of which ranks have parts after it; None if it is not known. The shapes do not show it
            where each rank has one, such as one head.

    Raises:
        LayoutError: it does not keep the divided dimension.
    """
    if math.prod(shape) == 0:
        return UNKNOWN
    atoms, part, outer, same = _atoms(shape, layout), None, 1, set()
    for dimension, size in enumerate(new):
        taken: list[_Atom] = []
        while (left := size // math.prod(atom.size for atom in taken)) > 1 or (
            left == 1 and divided in (None, dimension) and _begins_here(atoms, taken, divided is not None)
        ):
            atom = atoms[0]
            if left % atom.size == 0:
                taken.append(atoms.pop(0))
            elif atom.size % left == 0:
                taken.append(_Atom(left, atom.part, atom.same))
                atoms[0] = _Atom(atom.size // left, same=atom.same, rest=True)
            elif layout.divided:
                raise LayoutError
            else:
                return WHOLE
        places = [place for place, atom in enumerate(taken) if atom.part]
        if places:
            if len(taken) > 1 and taken[0].rest:
                raise LayoutError
            part, outer = dimension, math.prod(atom.size for atom in taken[: places[0]])
        if taken and all(atom.same for atom in taken):
            same.add(dimension)
    if layout.part is not None and part is None:
        raise LayoutError
    return Local(part, outer, frozenset(same), layout.partial)


def _begins_here(atoms: list[_Atom], taken: list[_Atom], known: bool) -> bool:
    """Whether the divided piece is in a dimension whose size does not need it: each rank has one."""
    return bool(atoms) and atoms[0].part and (not taken or (known and atoms[0].size == 1))


def expanded(shape: Sequence[int], layout: Local, new: Sequence[int]) -> Local:
    """The layout after dimensions of size 1 were repeated.

    Args:
        shape: of the rank's tensor before it.
        layout: before it.
        new: shape after it.

    Raises:
        LayoutError: the divided dimension is repeated; in the whole tensor it does not have size 1.
    """
    more = len(new) - len(shape)
    grown = {dim for dim, size in enumerate(new) if dim < more or shape[dim - more] != size}
    part = None if layout.part is None else layout.part + more
    if part in grown:
        raise LayoutError
    return evolve(layout, part=part, same=frozenset(grown) | {dim + more for dim in layout.same})
