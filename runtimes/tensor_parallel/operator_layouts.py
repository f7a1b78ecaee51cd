"""The layouts of plain tensors of one rank between modules that ``parallelize_module`` divided, operator by operator.

Most rules are DTensor's: an operator on parts runs on DTensors of fake tensors, too. If the result is a part, with the
shape of the plain operator's result, then the plain operator computes this part. Views and expansions have rules of
their own: their arguments are sizes, which are those of a part here. Attention has one, too, as DTensor has no rule for
all of its kernels.

By default these modules take and return plain tensors: each rank's own part. What the user's code computes with a part
has to be the same part of what one process computes. It is not if the code takes the mean over a divided dimension, or
halves it, or computes with the number of heads of the whole model. torch computes all of these without an error::

    ColwiseParallel ──▶ part of dimension 2 ──▶ view, softmax, … : layouts are followed ──▶ RowwiseParallel
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...core.capture.graph.sizes import equal


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

    Raises:
        LayoutError: the divided dimension is repeated; in the whole tensor it does not have size 1.
    """
    more = len(new) - len(shape)
    grown = {dim for dim, size in enumerate(new) if dim < more or shape[dim - more] != size}
    part = None if layout.part is None else layout.part + more
    if part in grown:
        raise LayoutError
    return evolve(layout, part=part, same=frozenset(grown) | {dim + more for dim in layout.same})


aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SAME = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}  # fmt: skip
_LIKE = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like}
_CONSTANTS = {
    aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty,
}  # fmt: skip
"""Of sizes; a new tensor has its values later, or equal ones."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
_NORMS = {aten.native_layer_norm.default, aten._fused_rms_norm.default}


class OperatorLayouts:
    """Finds the layouts of results."""

    def __init__(self, mesh: Any, fake_mode: FakeTensorMode) -> None:
        self._mesh, self._fake_mode = mesh, fake_mode
        self._known: dict[Any, list[Local]] = {}

    def of(
        self, func: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Tensor], layouts: Sequence[Local],
        out: Sequence[Tensor], one_process: tuple[int, ...] | None = None,
    ) -> list[Local]:  # fmt: skip
        """The layouts of an operator's results.

        Args:
            given: the tensors in the arguments, in order.
            one_process: the shape that the result of a view has in one process; None if it is not known.

        Raises:
            LayoutError: a result is not the part of what one process computes.
        """
        if func.overloadpacket in _LIKE and layouts[0].divided:
            return [evolve(layouts[0], partial=False)]
        if func.overloadpacket in _LIKE | _CONSTANTS:
            return [Local(same=frozenset(range(each.ndim))) for each in out]
        if not all(layout.known for layout in layouts) or func.namespace == "_c10d_functional":
            return [UNKNOWN] * len(out)
        if func in VIEWS or func is aten.expand.default:
            return [self._reshaped(func, given[0], layouts[0], out[0], one_process)]
        if func in _SAME:
            return [layouts[0]]
        return self._computed(func, args, kwargs, given, layouts, out)

    def _reshaped(
        self, func: torch._ops.OpOverload, given: Tensor, layout: Local, out: Tensor, one_process: Any
    ) -> Local:
        if func not in VIEWS:
            return expanded(given.shape, layout, out.shape)
        ranks = self._mesh.size()
        if one_process is None or layout.part is None:
            return viewed(given.shape, layout, out.shape)
        parts = [dim for dim, size in enumerate(out.shape) if equal(one_process[dim : dim + 1], (size * ranks,))]
        found = viewed(given.shape, layout, out.shape, parts[0] if len(parts) == 1 else None)
        if one_process != tuple(size * ranks if dim == found.part else size for dim, size in enumerate(out.shape)):
            raise LayoutError
        return found

    def _computed(
        self, func: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Tensor], layouts: Sequence[Local],
        out: Sequence[Tensor],
    ) -> list[Local]:  # fmt: skip
        if not any(layout.divided for layout in layouts):
            return [_moved(func, args, layouts[0], out[0]) if len(given) == len(out) == 1 else WHOLE] * len(out)
        if torch.Tag.nondeterministic_seeded in func.tags and func not in _ATTENTION:  # its rate is 0
            return [layouts[0] if each.shape == given[0].shape else UNKNOWN for each in out]
        key = (
            func, repr(pytree.tree_map_only(Tensor, lambda each: (each.shape, each.dtype), (args, kwargs))),
            repr(layouts),  # symbolic sizes have no hash
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._by_dtensor(func, args, kwargs, given, layouts, out)
        return self._known[key]

    def _by_dtensor(
        self, func: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Tensor], layouts: Sequence[Local],
        out: Sequence[Tensor],
    ) -> list[Local]:  # fmt: skip
        """The layouts of results by DTensor's rules.

        Whole tensors whose values are equal along a dimension may be taken as parts of it.
        """
        parts = [(given[i].shape[each.part], each.outer) for i, each in enumerate(layouts) if each.part is not None]
        if any(outer != parts[0][1] for _, outer in parts):
            return [UNKNOWN] * len(out)
        choices = [
            [layout] if layout.divided else [layout, *(Local(dim) for dim in sorted(layout.same))] for layout in layouts
        ]
        for chosen in itertools.islice(itertools.product(*choices), 16):
            try:
                if func in _NORMS and (chosen[0].part or 0) >= given[0].ndim - len(args[1]):
                    raise LayoutError
                if func in _ATTENTION:
                    found = _of_attention(given, chosen, out)
                else:
                    found = self._once(func, args, kwargs, given, chosen, out)
            except LayoutError:
                continue
            if not parts or parts[0][1] == 1:
                return found
            return [
                evolve(layout, outer=parts[0][1])
                if layout.part is not None and all(each.shape[layout.part] == size for size, _ in parts)
                else UNKNOWN if layout.divided else layout
                for layout, each in zip(found, out, strict=True)
            ]  # fmt: skip
        raise LayoutError

    def _once(
        self, func: torch._ops.OpOverload, args: Any, kwargs: Any, given: Sequence[Tensor], layouts: Any,
        out: Sequence[Tensor],
    ) -> list[Local]:  # fmt: skip
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        of = {id(tensor): layout for tensor, layout in zip(given, layouts, strict=True)}

        def whole(tensor: Tensor) -> Any:
            layout = of[id(tensor)]
            placement = Shard(layout.part) if layout.part is not None else Partial() if layout.partial else Replicate()
            with self._fake_mode:
                local = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return DTensor.from_local(local, self._mesh, [placement], run_check=False)

        with _disable_current_modes(), torch.no_grad(), _quiet():
            whole_args, whole_kwargs = pytree.tree_map_only(Tensor, whole, (args, kwargs))
            try:
                with self._fake_mode:
                    results = func(*whole_args, **whole_kwargs)
            except NotImplementedError:
                return [UNKNOWN] * len(out)
            except Exception:
                if any(
                    not layout.divided and tensor.numel() > 1 for tensor, layout in zip(given, layouts, strict=True)
                ):
                    raise LayoutError from None  # sizes of a part next to sizes of the whole
                return [UNKNOWN] * len(out)
        found = []
        for result, local in zip((e for e in pytree.tree_leaves(results) if isinstance(e, Tensor)), out, strict=True):
            if not isinstance(result, DTensor):
                return [UNKNOWN] * len(out)
            layout = layout_of(result.placements[0])
            computed = result._local_tensor.shape == local.shape and (
                layout.partial or (layout.divided and not any(each.partial for each in layouts))
            )
            if layout.known and not computed:
                raise LayoutError
            found.append(layout)
        return found


def layout_of(placement: Any) -> Local:
    """That of a plain tensor with a DTensor's placement."""
    if placement.is_replicate():
        return WHOLE
    if placement.is_partial():
        return PARTIAL
    return Local(placement.dim) if type(placement).__name__ == "Shard" else UNKNOWN


def _moved(func: torch._ops.OpOverload, args: Any, layout: Local, out: Tensor) -> Local:
    """The layout of a whole tensor after dimensions were exchanged; others lose track of equal values."""
    if not layout.same:
        return WHOLE
    is_view = any(each.alias_info is not None for each in func._schema.returns)
    if len(layout.same) == args[0].ndim and (is_view or torch.Tag.pointwise in func.tags):
        return Local(same=frozenset(range(out.ndim)))
    rank = args[0].ndim
    if func is aten.permute.default:
        return Local(same=frozenset(new for new, old in enumerate(args[1]) if old % rank in layout.same))
    if func in (aten.transpose.int, aten.t.default):
        first, second = (args[1] % rank, args[2] % rank) if func is aten.transpose.int else (0, 1)
        swap = {first: second, second: first}
        return Local(same=frozenset(swap.get(dim, dim) for dim in layout.same))
    return Local(same=layout.same) if torch.Tag.pointwise in func.tags else WHOLE


def _of_attention(given: Sequence[Tensor], layouts: Any, out: Sequence[Tensor]) -> list[Local]:
    """Attention works on each sample and each head alone."""
    part = layouts[0].part
    fits = part in (0, 1) and all(layout.part == part and not layout.partial for layout in layouts[:3])
    for tensor, layout in zip(given[3:], layouts[3:], strict=True):  # masks
        across = part is not None and part - (4 - tensor.ndim) >= 0 and tensor.shape[part - (4 - tensor.ndim)] > 1
        fits = fits and (layout.part == part - (4 - tensor.ndim) if across else not layout.divided)
    if not fits:
        raise LayoutError
    return [Local(part) if each.ndim > part else WHOLE for each in out]


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without the log of operators that fail on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
