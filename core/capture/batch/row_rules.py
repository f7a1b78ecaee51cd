"""Whether a step treats each sample independently, from the shapes of its operators.

A step runs on fake tensors with a number of samples that has a prime factor which no other size has. A dimension whose
size is divisible by it *carries* samples. `RowWatch` records the operators that do not treat samples independently:

    lookup       reads rows that are selected by values of the batch, such as table[ids]
    positional   depends on a sample's position: positions, convolution, recurrence, attention, a part of the rows
    joint        relates samples in another way: all pairs, a sum over samples that is not a mean

If there are none, cutting the batch does not change the mean loss. BatchNorm computes statistics over all dimensions
but one, so it indicates nothing and is ignored.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..values.code_origin import is_user_code
from .row_operators import (
    ALONG,
    BY_INDEX,
    COPIES,
    GROUPS,
    JOINT_ALONG,
    LOSSES,
    MATRICES,
    NEW,
    NUMBERS_ROWS,
    PRODUCTS,
    REDUCTIONS,
    SPATIAL,
    SUMS,
)

LOOKUP, POSITIONAL, JOINT = "lookup", "positional", "joint"

MAX_OPERATORS = 50_000
"""Largest number of operators of a trace: a loop that waits for a value, which fake tensors do not have, never ends."""

_UNKNOWN_ROWS = 7
"""Number of rows of a selection that depends on values and does not carry samples; a prime that is no other size."""


@frozen
class Finding:
    """An operator that does not treat samples independently.

    Args:
        kind: `LOOKUP`, `POSITIONAL` or `JOINT`.
        operator: its name.
        line: of the user's code, or "".
    """

    kind: str
    operator: str
    line: str


class Dependent(BaseException):
    """Ends a trace at the first finding; a BaseException, so that the step's code does not catch it."""


class TooLong(Exception):
    """A trace ran more than ``MAX_OPERATORS`` operators."""


class RowWatch(TorchDispatchMode):
    """A mode that watches a step on fake tensors, with a size of the batch that is a multiple of a prime.

    Operators whose result depends on values return placeholders, so that the step continues: numbers are 0 or 1;
    selections have some rows, or all of them if every bool is True.

    Args:
        prime: divides no other size.
        rows: the size of the batch.
        truth: the value of every bool.
        stops: whether the first finding ends the trace.

    Attributes:
        findings: operators that do not treat samples independently, each kind of each operator once.
        asked: whether the step needed a value, or a selection.
        reach: number of operators with samples among their inputs.
        read: identities of the operators' input tensors.
    """

    def __init__(self, prime: int, rows: int, truth: bool, stops: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prime, self._rows, self._truth, self._stops = prime, rows, truth, stops
        self.asked = False
        self.reach = 0
        self.findings: dict[tuple[str, str], Finding] = {}
        self.read: set[int] = set()
        self._marks: Any = WeakIdKeyDictionary()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        if self._count > MAX_OPERATORS:
            raise TooLong(f"the step runs more than {MAX_OPERATORS} operators")
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.read.update(map(id, given))
        name = func._schema.name.partition("::")[2]
        if given and (found := self._of_unknown_value(name, args)) is not NotImplemented:
            return found
        if name == "_grouped_mm" and args[0].ndim == 2 and args[1].ndim == 3:  # its fake form supports bfloat16 only
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            args = (args[0], self._whole_numbers(args[1]), *args[2:])
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            self._pass_on_given(given, made)
            self._judge(_Call(func, name, args, kwargs, given, made))
        return result

    def read_numbers(self, batch: Sequence[Tensor]) -> None:
        """Mark the integer tensors of a batch, which may be indices of its rows."""
        for tensor in batch:
            if _is_whole(tensor):
                self._marks[tensor] = frozenset({"given"})

    def _pass_on_given(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        if any(_is_whole(t) and "given" in self._marks.get(t, ()) for t in given):
            for tensor in filter(_is_whole, made):
                self._marks[tensor] = self._marks.get(tensor, frozenset()) | {"given"}

    # Operators that depend on values

    def _of_unknown_value(self, name: str, args: Any) -> Any:
        tensor = args[0]
        if name == "_local_scalar_dense":
            self.asked = True
            return self._truth if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        if name == "equal":
            self.asked = True
            return self._truth
        if name == "nonzero":
            return self._selected(tensor, (tensor.ndim,), torch.int64)
        if name == "masked_select":
            return self._selected(tensor, (), tensor.dtype)
        if name in ("_unique2", "unique_consecutive") and len(args) < 4:
            picked = self._selected(tensor, (), tensor.dtype)
            return picked, torch.empty_like(tensor, dtype=torch.int64), torch.empty_like(picked, dtype=torch.int64)
        return NotImplemented

    def _selected(self, tensor: Tensor, rest: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.asked = True
        rows = tensor.numel() if self._truth else self._rows if self.carried(tensor) else _UNKNOWN_ROWS
        found = tensor.new_empty((rows, *rest), dtype=dtype)
        self._marks[found] = frozenset({"number"})
        return found

    def _whole_numbers(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which masks are replaced by row numbers of the selected rows."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                found += [self._selected(index, (), torch.int64)] * index.ndim
            else:
                found.append(index)
        return found

    # Independence of samples

    def carried(self, tensor: Tensor) -> list[int]:
        """Dimensions that carry samples."""
        return [d for d, size in enumerate(tensor.shape) if size and size % self._prime == 0]

    def _judge(self, call: "_Call") -> None:
        carrying = [t for t in call.given if self.carried(t)]
        marks: frozenset[str] = frozenset().union(*(self._marks.get(t, ()) for t in call.given))
        square = self._prime**2
        if any(t.numel() and t.numel() % square == 0 for t in call.made):
            if not any(t.numel() and t.numel() % square == 0 for t in call.given):
                self._note(JOINT, call)
            return
        if not carrying:
            self._judge_constant(call, marks)
            return
        self.reach += 1
        if "reduced" in marks:
            self._note(JOINT, call)
        kept = call.func.is_view or call.name in COPIES
        if kept:
            self._pass_on(call, marks & {"number"})
        elif "number" in marks:
            self._judge_numbers(call)
        self._judge_operator(call)
        self._judge_lost(call, kept)

    def _judge_constant(self, call: "_Call", marks: frozenset[str]) -> None:
        """Judge an operator without samples among its inputs."""
        made = [t for t in call.made if self.carried(t)]
        if made and call.name in NUMBERS_ROWS:
            self._pass_on(call, frozenset({"number"}))
        elif "reduced" in marks:
            products = sum("reduced" in self._marks.get(t, ()) for t in call.given) > 1 and call.name in ("mul", "div")
            if not (call.func.is_view or call.name in COPIES | SUMS) or products:
                self._note(JOINT, call)
            else:
                self._pass_on(call, frozenset({"reduced"}))

    def _pass_on(self, call: "_Call", marks: frozenset[str]) -> None:
        if marks:
            for tensor in call.made:
                if tensor.numel() > 1:
                    self._marks[tensor] = self._marks.get(tensor, frozenset()) | marks

    def _judge_numbers(self, call: "_Call") -> None:
        """Judge an operator that uses row numbers for something else than selecting rows."""
        if call.name.startswith("index") or call.name in NEW or call.name.startswith("_embedding_bag"):
            return
        others = [t for t in call.given if "number" not in self._marks.get(t, ()) and t.numel() > 1]
        if torch.Tag.pointwise in call.func.tags and not others:
            self._pass_on(call, frozenset({"number"}))
        else:
            self._note(JOINT if call.name in LOSSES or call.name in BY_INDEX else POSITIONAL, call)

    def _judge_lost(self, call: "_Call", kept: bool) -> None:
        """Judge an operator whose results do not carry samples."""
        if call.name in NEW or not call.made:
            return
        lost = [t for t in call.made if t.numel() > 1 and not self.carried(t)]
        if kept:
            if any(not self.carried(t) for t in call.made):
                self._note(POSITIONAL, call)
        elif call.name in REDUCTIONS | LOSSES | BY_INDEX or call.name in PRODUCTS:
            for tensor in lost:
                self._marks[tensor] = frozenset({"reduced"})
        elif lost and lost[0] is call.made[0]:
            self._note(POSITIONAL, call)

    def _judge_operator(self, call: "_Call") -> None:
        name, args = call.name, call.args
        first = args[0] if args and isinstance(args[0], Tensor) else call.given[0]
        where = self.carried(first)
        if torch.Tag.pointwise in call.func.tags or call.func.is_view:
            return
        if name in PRODUCTS:
            one, other = PRODUCTS[name]
            ends = [(args[one], -1)] + ([] if other is None else [(args[other], max(args[other].ndim - 2, 0))])
            if any(d % t.ndim in self.carried(t) for t, d in ends):
                self._note(JOINT, call)
        elif name == "embedding" or name.startswith("_embedding_bag"):
            if where:
                self._note_index(call, args[1])
            if name != "embedding" and self.carried(args[2]) and "number" not in self._marks.get(args[2], ()):
                self._note(LOOKUP, call)
        elif name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
            self._judge_index(call, first, args[1])
        elif name in BY_INDEX:
            if args[1] % max(first.ndim, 1) in where or (name.startswith(("scatter", "index_")) and not where):
                self._note_index(call, args[2])
        elif name in ALONG:
            dims = call.argument("dim", "dims")
            dims = [dims] if isinstance(dims, int) else [-1] if dims is None else list(dims)
            if any(d % max(first.ndim, 1) in where for d in dims):
                self._note(JOINT if name in JOINT_ALONG else POSITIONAL, call)
        else:
            self._judge_layer(call, first, where)

    def _judge_layer(self, call: "_Call", first: Tensor, where: list[int]) -> None:
        name, args = call.name, call.args
        if name in ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"):
            wrong = any(d >= first.ndim - len(args[1]) for d in where)
        elif name.startswith(GROUPS) or "convolution" in name:
            wrong = any(d != 0 for d in where) or any(self.carried(t) for t in call.given[1:])
        elif name.startswith(SPATIAL):
            digits = [int(c) for c in name if c.isdigit()]
            wrong = any(d >= first.ndim - (digits[-1] if digits else 2) for d in where)
        elif "scaled_dot_product" in name or "_attention_forward" in name:
            wrong = any(t.ndim - 2 in self.carried(t) for t in call.given[:3])
        elif name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"):
            wrong = (1 if call.argument("batch_first") and name != "mkldnn_rnn_layer" else 0) in where
        elif name.startswith(MATRICES) and name not in REDUCTIONS:
            wrong = any(d >= first.ndim - 2 for d in where)
        else:
            return
        if wrong:
            self._note(POSITIONAL, call)

    def _judge_index(self, call: "_Call", first: Tensor, indices: Sequence[Any]) -> None:
        for d, index in enumerate(indices):
            if not isinstance(index, Tensor):
                continue
            if d in self.carried(first):
                self._note_index(call, index)
            elif "number" in self._marks.get(index, ()) and not any(
                d in self.carried(first) for d, i in enumerate(indices) if isinstance(i, Tensor)
            ):
                self._note(POSITIONAL, call)

    def _note_index(self, call: "_Call", index: Tensor) -> None:
        """Record that rows are selected by an index, unless each sample selects its own row."""
        marks = self._marks.get(index, ())
        if "number" not in marks:
            self._note(LOOKUP if "given" in marks else JOINT, call)

    def _note(self, kind: str, call: "_Call") -> None:
        if (kind, call.name) not in self.findings:
            self.findings[kind, call.name] = Finding(kind, call.name, _current_line())
            if self._stops:
                raise Dependent


@frozen
class _Call:
    """A call of an operator: its name, arguments, input tensors and result tensors."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    given: list[Tensor]
    made: list[Tensor]

    def argument(self, *names: str) -> Any:
        """The value of the first of these parameters that the operator has; None if it has none of them."""
        for place, parameter in enumerate(self.func._schema.arguments):
            if parameter.name in names:
                if parameter.name in self.kwargs:
                    return self.kwargs[parameter.name]
                return self.args[place] if place < len(self.args) else parameter.default_value
        return None


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _current_line() -> str:
    """The user's line that is running now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
