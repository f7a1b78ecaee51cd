"""Follows the layouts of plain tensors while a step is recorded, and refuses what one process would not compute.

Random draws of tensor ranks have the numbers of one process. A draw of a tensor that all ranks have is the same on all
of them. Of a tensor that is divided, such as the weights of a rank's attention heads, each rank draws the whole and
takes its part::

    one process     bernoulli_(B, heads, T, T)
    tensor rank     bernoulli_(B, heads, T, T) ─ own_part ─▶ (B, heads ÷ ranks, T, T) ─ copy_ ─▶ the user's tensor

The padding of an embedding whose rows are divided is a row of one rank alone.

The shapes of the whole are those of a run as in one process, without torch's layouts, call by call: a shape of the part
alone does not show whether one head of a rank is a dimension that is divided.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ...core.capture.graph.randomness import draws_nothing
from ...core.capture.values.nesting import tensors_of
from ...core.capture.values.user_lines import current_line
from ...core.errors import RequestError, in_a_line
from ...core.tensor_collectives import OWN_PART
from .operator_layouts import UNKNOWN, VIEWS, WHOLE, LayoutError, Local, OperatorLayouts, layout_of

Shape = tuple[int, ...]
_TORCH = "torch.distributed.tensor"
_COPY = torch.ops.aten.clone.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


@contextmanager
def without_layouts(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a model computes with plain tensors, without the hooks of ``parallelize_module``.

    Args:
        values: whole parameters and buffers, by name.
    """
    removed: list[tuple[Any, dict[int, Any]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                before = dict(hooks)
                ours = [key for key, hook in before.items() if _of_torch(hook)]
                if ours:
                    removed.append((hooks, before))
                for key in ours:
                    del hooks[key]
        with _reparametrize_module(model, dict(values)):
            yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


def _of_torch(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_TORCH)


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


class NumberedOperators(TorchDispatchMode):
    """A mode that knows the place of each operator (`CallNumbers`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = CallNumbers()

    def __enter__(self) -> Self:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*failure)  # type: ignore[no-untyped-call]


class WholeCalls(NumberedOperators):
    """Records the shapes of a step of one process.

    Attributes:
        found: place of an operator → the operator, and the shapes of its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int], tuple[Any, list[Shape]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = tensors_of(result)
        if made and func is not _COPY:
            self.found[self._calls.next_operator()] = func, [tuple(tensor.shape) for tensor in made]
        return result


_NOT_A_PART = "its result is not this rank's part of what one process computes"
HEADS = (
    "the ranks have to divide the heads, and a number of heads in the code has to be that of one rank: divide it, or "
    "let the view infer it (-1)"
)
"""What to do about a view that does not fit a part."""
_FIX = (
    "use output_layouts=Replicate() in the module before it, or wrap what is a part with "
    "DTensor.from_local(part, mesh, [Shard(dim)]).to_local()"
)


class LayoutWatch(NumberedOperators):
    """A mode in which operators on parts are checked, and draws are those of one process.

    Args:
        whole: the calls of the step in one process, or why it does not run there.
    """

    supports_higher_order_operators = True

    def __init__(self, mesh: Any, fake_mode: FakeTensorMode, whole: WholeCalls | RequestError) -> None:
        super().__init__()
        self._mesh, self._operators = mesh, OperatorLayouts(mesh, fake_mode)
        self._layouts: Any = WeakIdKeyDictionary()
        self._whole = whole

    def layout(self, tensor: Tensor) -> Local:
        """That of a plain tensor."""
        return self._layouts.get(tensor, WHOLE)  # type: ignore[no-any-return]

    def apply(self, function: type, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an autograd function of torch.distributed: conversions between DTensors and plain tensors, collectives.

        Raises:
            RequestError: a module takes its input with another layout than it has, or returns uneven parts.
        """
        name = function.__name__
        if name == "_FromTorchTensor":
            self._check_claim(args[0], args[2][0])
        elif name == "_ToTorchTensor":
            _check_even(args[0])
        before, self._calls.paused = self._calls.paused, True
        try:
            found = original(function, *args, **kwargs)
        finally:
            self._calls.paused = before
        if name == "_ToTorchTensor":
            self._layouts[found] = layout_of(args[0].placements[0])
        else:
            self._note_parts(found)
        return found

    def _note_parts(self, found: Any) -> None:
        """Note the parts of DTensors, which code may take without a conversion; other results are not known."""
        for each in pytree.tree_leaves(found):
            if hasattr(each, "placements"):
                self._layouts[each._local_tensor] = layout_of(each.placements[0])
            elif isinstance(each, Tensor):
                self._layouts[each] = UNKNOWN

    def check_results(self, results: Any) -> None:
        """Refuse numbers that the step returns, such as the loss, that are not those of all ranks.

        Raises:
            RequestError: one is.
        """
        for value in pytree.tree_leaves(results):
            if isinstance(value, Tensor) and value.ndim == 0 and self.layout(value).divided:
                raise RequestError(
                    f"the step returns a number that {self._text(self.layout(value))}: all ranks must return the same; "
                    "use output_layouts=Replicate() in the last layer, or loss_parallel"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        kwargs = kwargs or {}
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if self._calls.paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        layouts = [self._layout_of_any(each) for each in given]
        if any(isinstance(each, DTensor) for each in given):
            if is_draw(func, args, kwargs) and any(layout != WHOLE for layout in layouts):
                return self._drawn_dtensor(func, args, kwargs, layouts)
            found = func(*with_own_padding(func, args), **kwargs)
            self._note_parts(found)
            return found
        if is_draw(func, args, kwargs):
            return self._drawn(func, args, kwargs, layouts)
        try:
            found = func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if not any(layout.divided for layout in layouts):
                raise
            raise self._refusal(func, given, layouts, in_a_line(error)) from error
        out = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
        if not out:
            return found
        one_process = self._one_process(func)
        try:
            of_out = self._operators.of(func, args, kwargs, given, layouts, out, one_process)
        except LayoutError:
            cause = _NOT_A_PART
            if one_process is not None and func in VIEWS:
                cause = f"its result has shape {tuple(out[0].shape)} here and {one_process} in one process"
            raise self._refusal(func, given, layouts, cause) from None
        self._note(func, out, of_out)
        return found

    def _note(self, func: torch._ops.OpOverload, out: list[Tensor], layouts: list[Local]) -> None:
        for tensor, layout in zip(out, layouts, strict=True):
            if layout != WHOLE or tensor in self._layouts:
                self._layouts[tensor] = layout
                if func._schema.is_mutable and tensor._base is not None:
                    self._layouts[tensor._base] = UNKNOWN

    def _layout_of_any(self, tensor: Any) -> Local:
        return layout_of(tensor.placements[0]) if hasattr(tensor, "placements") else self.layout(tensor)

    def _drawn(self, func: torch._ops.OpOverload, args: Any, kwargs: Any, layouts: list[Local]) -> Any:
        """Draw the numbers of one process."""
        if isinstance(self._whole, RequestError):
            raise self._whole
        of_one, shapes = self._whole.found.get(self._calls.next_operator(), (None, []))
        divided, ranks = [layout for layout in layouts if layout.divided], self._mesh.size()
        followed = all(layout.known and not layout.partial for layout in layouts)
        if of_one is not func or not followed or (divided and len(layouts) > 1):
            raise unknown_part(func)
        found = draw_part(func, args, kwargs, divided[0], ranks) if divided else func(*args, **kwargs)
        out = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
        layout = Local(divided[0].part, divided[0].outer) if divided else WHOLE
        if [_whole_shape(each, layout, ranks) for each in out] != shapes:
            raise unknown_part(func)
        self._note(func, out, [layout] * len(out))
        return found

    def _drawn_dtensor(self, func: torch._ops.OpOverload, args: Any, kwargs: Any, layouts: list[Local]) -> Any:
        """Draw the numbers of one process for the part of a DTensor."""
        from torch.distributed.tensor import DTensor

        first, ranks = args[0], self._mesh.size()
        if len(layouts) > 1 or not layouts[0].known or layouts[0].partial:
            raise unknown_part(func)
        if _whole_shape(first._local_tensor, layouts[0], ranks) != first.shape:  # parts are uneven
            raise unknown_part(func)
        parts = draw_part(func, (first._local_tensor, *args[1:]), kwargs, layouts[0], ranks)
        if func._schema.is_mutable:
            return first
        # The layout of a DTensor stays what it was.
        return pytree.tree_map(
            lambda part: DTensor.from_local(
                part, first.device_mesh, first.placements, run_check=False, shape=first.shape, stride=first.stride()
            ),
            parts,
        )

    def _one_process(self, func: torch._ops.OpOverload) -> Shape | None:
        """The shape that the result of a view has in one process; None if it is not known, or for other operators."""
        if func is torch.ops.aten.clone.default:
            return None
        place = self._calls.next_operator()
        if isinstance(self._whole, RequestError) or func not in VIEWS:
            return None
        other, shapes = self._whole.found.get(place, (None, []))
        return shapes[0] if other in VIEWS else None

    def _check_claim(self, value: Tensor, placement: Any) -> None:
        layout = self.layout(value)
        if not layout.known or not layout.divided:
            return
        wanted = layout_of(placement)
        if wanted.known and (wanted.part, wanted.outer, wanted.partial) != (layout.part, layout.outer, layout.partial):
            raise RequestError(
                f"{current_line()}a module takes a tensor of shape {tuple(value.shape)} as {placement!r}, and it "
                f"{self._text(layout)}: write its layout in input_layouts"
            )

    def _refusal(
        self, func: torch._ops.OpOverload, given: list[Tensor], layouts: list[Local],
        cause: str,
    ) -> RequestError:  # fmt: skip
        texts = [
            f"{tuple(tensor.shape)} that {self._text(layout)}" if layout.divided else f"{tuple(tensor.shape)}"
            for tensor, layout in zip(given, layouts, strict=True)
            if layout.divided or tensor.numel() > 1
        ]
        fix = f"{HEADS}; {_FIX}" if func in VIEWS else _FIX
        return RequestError(f"{current_line()}{_name(func)} of {' and '.join(texts)}: {cause}; {fix}")

    def _text(self, layout: Local) -> str:
        if layout.partial:
            return f"{self._mesh.size()} tensor ranks still have to sum"
        return f"is one of {self._mesh.size()} ranks' parts of dimension {layout.part}"


def _check_even(value: Any) -> None:
    (placement,) = value.placements
    ranks = value.device_mesh.size()
    if placement.is_shard() and value.shape[placement.dim] % ranks:
        raise RequestError(
            f"{current_line()}a module returns a tensor of shape {tuple(value.shape)} with layout {placement!r} over "
            f"{ranks} ranks: parts must be equal; use a size that the ranks divide, such as padded sequences, or "
            "output_layouts=Replicate()"
        )


def _whole_shape(tensor: Tensor, layout: Local, ranks: int) -> Shape:
    return tuple(size * ranks if dim == layout.part else size for dim, size in enumerate(tensor.shape))


def _name(func: torch._ops.OpOverload) -> str:
    return str(func.overloadpacket._qualified_op_name.split("::")[-1])


_EMBEDDING = torch.ops.aten.embedding.default


def with_own_padding(func: torch._ops.OpOverload, args: Any) -> Any:
    """The arguments of an embedding whose padding is counted in this rank's rows.

    DTensor passes ``padding_idx`` on to each rank's rows, so each rank would leave out the gradient of another row.
    """
    if func is not _EMBEDDING or len(args) < 3 or args[2] < 0 or not hasattr(args[0], "placements"):
        return args
    (placement,) = args[0].placements
    if not placement.is_shard(0):
        return args
    mesh = args[0].device_mesh
    rows = args[0].shape[0] // mesh.size()
    own = args[2] - mesh.get_local_rank() * rows
    return (*args[:2], own if 0 <= own < rows else -1, *args[3:])


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


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not draws_nothing(func, args, kwargs)


def draw_part(func: Any, args: Any, kwargs: Any, layout: Local, ranks: int) -> Any:
    """Draw the whole of a divided tensor, and take this rank's part.

    Args:
        func, args, kwargs: the draw for this rank's part, which is the first argument.

    Returns:
        What the draw returns.

    Raises:
        RequestError: the operator draws other numbers for other tensors of one shape, or is not known.
    """
    like, rest = args[0], args[1:]
    dim = layout.part
    assert dim is not None
    whole_shape = (*like.shape[:dim], like.shape[dim] * ranks, *like.shape[dim + 1 :])

    def part_of(draw: Any, *values: Any, **options: Any) -> Tensor:
        whole = draw(aten.new_empty.default(like, whole_shape), *values, **options)
        part: Tensor = OWN_PART(whole, dim, layout.outer, ranks)
        return part

    if func in _IN_PLACE:
        return aten.copy_.default(like, part_of(func, *rest, **kwargs))
    if func in _LIKE:
        return part_of(func, *rest, **kwargs)
    if func is aten.native_dropout.default:
        rate = rest[0]
        mask = part_of(aten.bernoulli_.float, 1 - rate)
        return like * mask * 0.0 if rate == 1 else like * (mask / (1 - rate)), mask.to(torch.bool)
    raise unknown_part(func)


def unknown_part(func: Any) -> RequestError:
    """The error for a draw whose part of the numbers of one process is not known."""
    return RequestError(
        f"{current_line()}{func} draws random numbers for a tensor of which this tensor rank's part is not known: "
        "tensor ranks draw the numbers of one process; draw where all ranks have the whole, or set the rate of dropout "
        "to 0"
    )
