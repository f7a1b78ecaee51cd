"""Random draws of tensor ranks with the numbers of one process.

A draw of a tensor that all ranks have is the same on all of them. Of a tensor that is divided, such as the weights of a
rank's attention heads, each rank draws the whole and takes its part::

    one process     bernoulli_(B, heads, T, T)
    tensor rank     bernoulli_(B, heads, T, T) ─ own_part ─▶ (B, heads ÷ ranks, T, T) ─ copy_ ─▶ the user's tensor

Which part a tensor is, `divisions` follows from the results of DTensor's layers, whose layouts are known. The shapes of
the whole are those of a run of the step with whole parameters on fake tensors, call by call (`WholeCalls`): a shape of
the part alone does not show whether one head of a rank is a dimension that is divided. A draw whose part is not known
is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...core.capture.graph.randomness import draws_nothing
from ...core.capture.graph.schemas import written_tensors
from ...core.capture.graph.tensor_collectives import OWN_PART
from ...core.capture.values.nesting import tensors_of
from ...core.capture.values.user_lines import current_line
from ...core.errors import RequestError
from .divisions import Division, Operands, Shape, divisions_of_results

aten = torch.ops.aten

_IN_PLACE = frozenset(
    {aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.random_.to,
     getattr(aten.random_, "from")}
)  # fmt: skip
_LIKE = frozenset(
    {aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
     aten.bernoulli.p}
)  # fmt: skip
"""Draws whose numbers depend on the number of elements of their first argument alone."""
_COPY = aten.clone.default
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not draws_nothing(func, args, kwargs)


class CallNumbers(TorchFunctionMode):
    """Numbers the calls of torch's functions by the user's code that return tensors.

    Attributes:
        number: of the call that runs now.
        operators: number of operators that it has run.
        paused: whether calls are not counted: those of torch's own layouts, which one process does not make.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = self.operators = 0
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and tensors_of(result):
            self.number += 1
            self.operators = 0
        return result

    def next_operator(self) -> tuple[int, int]:
        """The place of an operator: the call, and its number in the call, without copies."""
        self.operators += 1
        return self.number, self.operators


def _is_same(func: Any, other: Any) -> bool:
    """Whether operators are the same but for strides: ``reshape`` of other strides is a view of a copy."""
    return func is other or {func, other} <= _VIEWS


class WholeCalls(TorchDispatchMode):
    """Records the shapes of a step of one process.

    Attributes:
        found: place of an operator → the operator, and the shapes of its results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[int, int], tuple[Any, list[Shape]]] = {}
        self._calls = CallNumbers()

    def __enter__(self) -> "WholeCalls":
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_of(result)
        if made and func is not _COPY:
            self.found[self._calls.next_operator()] = func, [tuple(tensor.shape) for tensor in made]
        return result


class DividedDraws(TorchDispatchMode):
    """A mode under which the step of a tensor rank is recorded: it draws the numbers of one process.

    Args:
        whole: the calls of one process.
        ranks: number of tensor ranks.
        given: tensors that all ranks have.
    """

    def __init__(self, whole: WholeCalls, ranks: int, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._ranks = whole.found, ranks
        self._calls = CallNumbers()
        # None for a tensor that all ranks have; tensors that are not in it are unknown.
        self._known: Any = WeakIdKeyDictionary()
        for tensor in given:
            self._known[tensor] = None
        self._mixed: list[Any] = []

    def __enter__(self) -> "DividedDraws":
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*failure)  # type: ignore[no-untyped-call]

    @contextmanager
    def inside_layouts(self) -> Iterator[Callable[[Any, Any], None]]:
        """A context in which torch changes layouts; it gives a function that takes the arguments and the result."""
        before, self._calls.paused = self._calls.paused, True
        try:
            yield self._note_layouts
        finally:
            self._calls.paused = before

    def _note_layouts(self, args: Any, result: Any) -> None:
        from torch.distributed.tensor import DTensor

        sources = [value for value in tensors_of(args) if isinstance(value, DTensor)]
        for tensor in tensors_of(result):
            if isinstance(tensor, DTensor):
                self._note_layout(tensor._local_tensor, tensor)
            elif len(sources) == 1:
                self._note_layout(tensor, sources[0])

    def _note_layout(self, local: Tensor, value: Any) -> None:
        self._known.pop(local, None)
        layout = self._of_layout(value)
        if layout is not _UNKNOWN:
            self._known[local] = layout

    def _of_layout(self, value: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        (placement,) = value.placements
        if type(placement) is Replicate:
            return None
        if type(placement) is Shard and value.shape[placement.dim] % self._ranks == 0:
            return Division(placement.dim % value.ndim, 1, tuple(value.shape))
        return _UNKNOWN

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        if self._calls.paused:
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return self._over_layouts(func, args, kwargs)
        place = self._calls.next_operator
        given = tensors_of((args, kwargs))
        layouts = [self._layout(tensor) for tensor in given]
        if is_draw(func, args, kwargs):
            result = self._drawn(func, args, kwargs, given, layouts, self._whole.get(place()))
        else:
            result = func(*args, **kwargs)
            made = tensors_of(result)
            if not made:
                return result
            if func is _COPY:
                found = layouts
            else:
                found = self._results(func, args, kwargs, given, layouts, made, self._whole.get(place()))
            self._note(func, args, kwargs, made, found)
        return result

    def _layout(self, tensor: Tensor) -> Any:
        if any(tensor.untyped_storage()._cdata == storage._cdata for storage in self._mixed):
            return _UNKNOWN
        return self._known.get(tensor, _UNKNOWN if isinstance(tensor, FakeTensor) else None)

    def _results(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], layouts: list[Any], made: list[Tensor], whole: Any
    ) -> list[Any]:
        """The division of each result, None for a whole one, or unknown."""
        unknown = [_UNKNOWN] * len(made)
        parts = [tuple(tensor.shape) for tensor in made]
        if whole is None or not _is_same(whole[0], func) or len(whole[1]) != len(parts) or _UNKNOWN in layouts:
            return unknown
        divided = [(tensor, layout) for tensor, layout in zip(given, layouts, strict=True) if layout is not None]
        if not divided:
            return [None if part == one else _UNKNOWN for part, one in zip(parts, whole[1], strict=True)]
        operands = Operands(given, divided)
        found = divisions_of_results(func, args, kwargs, operands, parts, whole[1], self._ranks)
        return unknown if found is None else list(found)

    def _note(self, func: Any, args: Any, kwargs: Any, made: list[Tensor], found: list[Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            # Other views of the same memory would be noted as before.
            if found[0] is _UNKNOWN or self._layout(tensor) != found[0]:
                self._mixed.append(tensor.untyped_storage())
        for tensor, layout in zip(made, found, strict=True):
            self._known.pop(tensor, None)
            if layout is not _UNKNOWN:
                self._known[tensor] = layout

    def _over_layouts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on DTensors, which torch divides."""
        from torch.distributed.tensor import DTensor

        given, draws = tensors_of((args, kwargs)), is_draw(func, args, kwargs)
        layouts = [self._of_layout(each) if isinstance(each, DTensor) else self._layout(each) for each in given]
        if not draws or all(layout is None for layout in layouts):
            result = func(*args, **kwargs)
            for tensor in tensors_of(result):
                if isinstance(tensor, DTensor):
                    self._note_layout(tensor._local_tensor, tensor)
            return result
        first, layout = args[0], layouts[0]
        if layout is _UNKNOWN or len(given) > 1:
            _refuse(func)
        parts = self._draw_part(func, first._local_tensor, args[1:], kwargs, layout)
        if func in _IN_PLACE:
            return first
        # The layout of a DTensor stays what it was.
        return pytree.tree_map(
            lambda part: DTensor.from_local(
                part, first.device_mesh, first.placements, run_check=False, shape=first.shape, stride=first.stride()
            ),
            parts,
        )

    def _drawn(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], layouts: list[Any], whole: Any) -> Any:
        if all(layout is None for layout in layouts):
            result = func(*args, **kwargs)
            made = tensors_of(result)
            found = self._results(func, args, kwargs, given, layouts, made, whole)
            if _UNKNOWN in found:
                _refuse(func)
            self._note(func, args, kwargs, made, found)
            return result
        if len(given) > 1 or layouts[0] is _UNKNOWN:
            _refuse(func)
        if whole is None or whole[0] is not func or any(shape != layouts[0].whole for shape in whole[1]):
            _refuse(func)
        return self._draw_part(func, args[0], args[1:], kwargs, layouts[0])

    def _draw_part(self, func: Any, like: Tensor, rest: Any, kwargs: Any, division: Division) -> Any:
        """Draw the whole of a divided tensor, and take this rank's part."""

        def part_of(draw: Any, *values: Any, **options: Any) -> Tensor:
            whole = draw(aten.new_empty.default(like, division.whole), *values, **options)
            part: Tensor = OWN_PART(whole, division.dim, division.outer, self._ranks)
            return part

        result: Any
        if func in _IN_PLACE:
            result = aten.copy_.default(like, part_of(func, *rest, **kwargs))
        elif func in _LIKE:
            result = part_of(func, *rest, **kwargs)
        elif func is aten.native_dropout.default:
            rate = rest[0]
            mask = part_of(aten.bernoulli_.float, 1 - rate)
            result = like * mask * 0.0 if rate == 1 else like * (mask / (1 - rate)), mask.to(torch.bool)
        else:
            _refuse(func)
        for tensor in tensors_of(result):
            self._known[tensor] = division
        return result


class _Unknown:
    """The layout of a tensor that is not followed."""


_UNKNOWN = _Unknown()


def _refuse(func: Any) -> NoReturn:
    raise RequestError(
        f"{current_line()}{func} draws random numbers for a tensor of which this tensor rank's part is not known: "
        "tensor ranks draw the numbers of one process; draw where all ranks have the whole, or set the rate of dropout "
        "to 0"
    )
