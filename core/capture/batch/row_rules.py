"""Whether a step treats each sample independently, from the shapes of its operators.

A step runs on fake tensors with a number of samples that has a prime factor which no other size has. A dimension whose
size is divisible by it *carries* samples. `RowWatch` records the operators that do not treat samples independently:

    lookup       reads rows that are selected by values of the batch, such as table[ids]
    grouped      sums rows by values of the batch, such as the samples of each class
    positional   depends on a sample's position: positions, order, a part of the rows
    sequence     relates neighbours along a sequence: attention, convolution, recurrence, pooling
    joint        relates samples in another way: all pairs, a sum over samples that is not a mean
    total        combines samples with one number of all of them, such as their mean or the product of sizes

If there are none but totals, cutting the batch does not change the mean loss. BatchNorm computes statistics over all
dimensions but one, so it indicates nothing and is ignored.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ..values.nesting import tensors_of
from ..values.placeholder_results import PlaceholderResults
from ..values.user_lines import calling_line, message_start
from .flattened_rows import FlattenedRows
from .operator_call import OperatorCall
from .row_operators import (
    ACCUMULATING,
    ALONG,
    BY_INDEX,
    COPIES,
    JOINT_ALONG,
    LOSSES,
    MATRICES,
    NEW,
    NUMBERS_ROWS,
    PRODUCTS,
    REDUCTIONS,
    SAMPLES_FIRST,
    SPATIAL,
    SUMS,
)

LOOKUP, GROUPED, POSITIONAL, SEQUENCE, JOINT, TOTAL = "lookup", "grouped", "positional", "sequence", "joint", "total"

_NUMBERED, _OF_BATCH, _REDUCED, _TOTAL = "row numbers", "integers of the batch", "reduced", "total"
_SELECTED = "selected by "
"""Marks of tensors in a trace:

    row numbers              the number of each row, or of some selected rows
    integers of the batch    integers that the batch has, or computed from these: they may be indices
    reduced                  computed from all samples, without a dimension of samples
    total                    one number of all samples
    selected by …            rows of a table without samples that an integer tensor of the batch selects
"""


@frozen
class Finding:
    """An operator that does not treat samples independently.

    Args:
        kind: `LOOKUP`, `GROUPED`, `POSITIONAL`, `SEQUENCE`, `JOINT` or `TOTAL`.
        operator: its name.
        line: of the user's code, or "".
    """

    kind: str
    operator: str
    line: str

    def __str__(self) -> str:
        return message_start(self.line) + self.operator


class TraceStopped(BaseException):
    """A trace was stopped at its first finding; a BaseException, so that the step's code does not catch it."""


class RowWatch(PlaceholderResults):
    """A mode that watches a step on fake tensors, with a size of the batch that is a multiple of a prime.

    Args:
        prime: divides no other size.
        rows: the size of the batch.
        truth: the value of every bool.
        stops: whether the first finding but a total ends the trace.

    Attributes:
        findings: operators that do not treat samples independently, each kind of each operator once.
        reach: number of operators with samples among their inputs.
        read: identities of the operators' input tensors.
    """

    def __init__(self, prime: int, rows: int, truth: bool, stops: bool) -> None:
        super().__init__(truth)
        self._prime, self._rows, self._stops = prime, rows, stops
        self.reach = 0
        self.findings: dict[tuple[str, str], Finding] = {}
        self.read: set[int] = set()
        self._marks: Any = WeakIdKeyDictionary()
        self._flattened = FlattenedRows(prime)

    def note_inputs(self, given: Sequence[Tensor]) -> None:
        self.read.update(map(id, given))

    def note_call(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        made = tensors_of(result)
        if made:
            name = func._schema.name.partition("::")[2]
            self._pass_on_integers(given, made)
            call = OperatorCall(func, name, args, kwargs, list(given), made)
            if self._flattened.note_call(func, name, given, made):
                self._note(POSITIONAL, call)
            self._judge(call)

    def note_selection(self, indices: Tensor) -> None:
        self._marks[indices] = frozenset({_NUMBERED})

    def selected_rows(self, tensor: Tensor) -> int:
        return self._rows if self.carried(tensor) else super().selected_rows(tensor)

    def read_numbers(self, batch: Sequence[Tensor]) -> None:
        """Mark the integer tensors of a batch, which may be indices of its rows."""
        for tensor in batch:
            if _is_integer(tensor):
                self._marks[tensor] = frozenset({_OF_BATCH})

    def _pass_on_integers(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        if any(_is_integer(t) and _OF_BATCH in self._marks.get(t, ()) for t in given):
            for tensor in filter(_is_integer, made):
                self._marks[tensor] = self._marks.get(tensor, frozenset()) | {_OF_BATCH}

    def carried(self, tensor: Tensor) -> list[int]:
        """Dimensions that carry samples."""
        return [d for d, size in enumerate(tensor.shape) if size and size % self._prime == 0]

    def _judge(self, call: OperatorCall) -> None:
        carrying = [t for t in call.given if self.carried(t)]
        marks: frozenset[str] = frozenset().union(*(self._marks.get(t, ()) for t in call.given))
        self._judge_labels(call)
        self._judge_scattered(call)
        square = self._prime**2
        if any(t.numel() and t.numel() % square == 0 for t in call.made):
            if not any(t.numel() and t.numel() % square == 0 for t in call.given):
                self._note(JOINT, call)
            return
        if not carrying:
            self._judge_constant(call, marks)
            return
        self.reach += 1
        if _REDUCED in marks:
            self._note(JOINT, call)
        if _TOTAL in marks and torch.Tag.pointwise in call.func.tags:
            self._note(TOTAL, call)
        kept = call.func.is_view or call.name in COPIES
        if kept:
            self._pass_on(call, marks & {_NUMBERED})
        elif _NUMBERED in marks:
            self._judge_numbers(call)
        self._judge_operator(call, marks)
        self._judge_lost(call, kept)

    def _judge_constant(self, call: OperatorCall, marks: frozenset[str]) -> None:
        """Judge an operator without samples among its inputs."""
        made = [t for t in call.made if self.carried(t)]
        if _TOTAL in marks:
            self._mark(call.made, _TOTAL)
        if made and call.name in NUMBERS_ROWS:
            self._pass_on(call, frozenset({_NUMBERED}))
        elif _REDUCED in marks:
            products = sum(_REDUCED in self._marks.get(t, ()) for t in call.given) > 1 and call.name in ("mul", "div")
            if not (call.func.is_view or call.name in COPIES | SUMS) or products:
                self._note(JOINT, call)
            else:
                self._pass_on(call, frozenset({_REDUCED}))

    def _pass_on(self, call: OperatorCall, marks: frozenset[str]) -> None:
        if marks:
            for tensor in call.made:
                if tensor.numel() > 1:
                    self._marks[tensor] = self._marks.get(tensor, frozenset()) | marks

    def _mark(self, tensors: Sequence[Tensor], mark: str) -> None:
        for tensor in tensors:
            self._marks[tensor] = self._marks.get(tensor, frozenset()) | {mark}

    def _judge_labels(self, call: OperatorCall) -> None:
        """Judge a loss whose labels select among rows of the batch, such as among the texts of images."""
        if call.name.startswith("nll_loss") and call.name.endswith("forward"):
            scores, labels = call.args[:2]
            if min(1, scores.ndim - 1) in self.carried(scores):
                self._note_index(call, labels)

    def _judge_scattered(self, call: OperatorCall) -> None:
        """Judge values that a mask distributes: each sample takes those after the ones of earlier samples."""
        if call.name.startswith("masked_scatter"):
            tensor, _, source = call.args
            if self.carried(tensor) and not self.carried(source):
                self._note(POSITIONAL, call)

    def _judge_by_index(self, call: OperatorCall, first: Tensor, where: list[int]) -> None:
        """Judge an operator of `BY_INDEX`; where it writes values of samples at places of a table without samples, such
        as sums over those of each class."""
        source, dim = call.args[3] if len(call.args) > 3 else None, call.args[1] % max(first.ndim, 1)
        if call.name.startswith(("index_add", "index_copy", "index_reduce")):
            call.check_rows(dim)
        if dim in where:
            self._note_index(call, call.args[2])
            return
        if where or call.name in ("gather", "index_select"):
            return
        own = _selected_by(call.args[2])
        selected = {mark for mark in self._marks.get(source, ()) if mark.startswith(_SELECTED)} - {own}
        if call.name.startswith(ACCUMULATING) and not selected:
            self._note(GROUPED, call)
        else:
            self._note_index(call, call.args[2])

    def _note_selected(self, call: OperatorCall, where: list[int]) -> None:
        """Mark rows that values of the batch select from a table without samples, as edges of a graph select nodes.

        Sums of such rows by the same values are by the class of each sample; by others they relate samples.
        """
        if call.name not in ("embedding", "index", "index_select"):
            return
        index = pytree.tree_leaves(call.args[2 if call.name == "index_select" else 1])
        given = [t for t in index if isinstance(t, Tensor) and _OF_BATCH in self._marks.get(t, ())]
        if not where:
            self._pass_on(call, frozenset(map(_selected_by, given)))

    def _judge_numbers(self, call: OperatorCall) -> None:
        """Judge an operator that uses row numbers for something else than selecting rows."""
        if call.name.startswith("index") or call.name in NEW or call.name.startswith("_embedding_bag"):
            return
        others = [t for t in call.given if _NUMBERED not in self._marks.get(t, ()) and t.numel() > 1]
        if torch.Tag.pointwise in call.func.tags and not others:
            self._pass_on(call, frozenset({_NUMBERED}))
        else:
            self._note(JOINT if call.name in LOSSES or call.name in BY_INDEX else POSITIONAL, call)

    def _judge_lost(self, call: OperatorCall, kept: bool) -> None:
        """Judge an operator whose results do not carry samples."""
        if call.name in NEW or not call.made:
            return
        lost = [t for t in call.made if t.numel() > 1 and not self.carried(t)]
        if kept:
            if any(not self.carried(t) for t in call.made):
                self._note(POSITIONAL, call)
        elif call.name in REDUCTIONS | LOSSES | BY_INDEX or call.name in PRODUCTS:
            if call.name in REDUCTIONS:
                self._mark([t for t in call.made if t.numel() == 1], _TOTAL)
            for tensor in lost:
                self._marks[tensor] = frozenset({_REDUCED})
        elif lost and lost[0] is call.made[0]:
            self._note(POSITIONAL, call)

    def _judge_operator(self, call: OperatorCall, marks: frozenset[str]) -> None:
        name, args = call.name, call.args
        first = args[0] if args and isinstance(args[0], Tensor) else call.given[0]
        where = self.carried(first)
        if torch.Tag.pointwise in call.func.tags or call.func.is_view:
            self._pass_on(call, frozenset(mark for mark in marks if mark.startswith(_SELECTED)))
            return
        self._note_selected(call, where)
        if name in PRODUCTS:
            one, other = PRODUCTS[name]
            ends = [(args[one], -1)] + ([] if other is None else [(args[other], max(args[other].ndim - 2, 0))])
            if any(d % t.ndim in self.carried(t) for t, d in ends):
                self._note(JOINT, call)
        elif name == "embedding" or name.startswith("_embedding_bag"):
            if where:
                self._note_index(call, args[1])
            if name != "embedding" and self.carried(args[2]) and _NUMBERED not in self._marks.get(args[2], ()):
                self._note(LOOKUP, call)
        elif name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
            self._judge_index(call, first, args[1])
        elif name in BY_INDEX:
            self._judge_by_index(call, first, where)
        elif name in ALONG:
            dims = call.argument("dim", "dims")
            dims = [dims] if isinstance(dims, int) else [-1] if dims is None else list(dims)
            if any(d % max(first.ndim, 1) in where for d in dims):
                self._note(JOINT if name in JOINT_ALONG else POSITIONAL, call)
        else:
            self._judge_layer(call, first, where)

    def _judge_layer(self, call: OperatorCall, first: Tensor, where: list[int]) -> None:
        name, args, kind = call.name, call.args, SEQUENCE
        if name in ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"):
            kind, wrong = POSITIONAL, any(d >= first.ndim - len(args[1]) for d in where)
        elif name.startswith(SAMPLES_FIRST) or "convolution" in name:
            wrong = any(d != 0 for d in where) or any(self.carried(t) for t in call.given[1:])
        elif name.startswith(SPATIAL):
            digits = [int(c) for c in name if c.isdigit()]
            wrong = any(d >= first.ndim - (digits[-1] if digits else 2) for d in where)
        elif "scaled_dot_product" in name or "_attention_forward" in name:
            wrong = any(t.ndim - 2 in self.carried(t) for t in call.given[:3])
        elif name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"):
            wrong = (1 if call.argument("batch_first") and name != "mkldnn_rnn_layer" else 0) in where
        elif name.startswith(MATRICES) and name not in REDUCTIONS:
            kind, wrong = POSITIONAL, any(d >= first.ndim - 2 for d in where)
        else:
            return
        if wrong:
            self._note(kind, call)

    def _judge_index(self, call: OperatorCall, first: Tensor, indices: Sequence[Any]) -> None:
        for d, index in enumerate(indices):
            if not isinstance(index, Tensor):
                continue
            if d in self.carried(first):
                self._note_index(call, index)
            elif _NUMBERED in self._marks.get(index, ()) and not any(
                d in self.carried(first) for d, i in enumerate(indices) if isinstance(i, Tensor)
            ):
                self._note(POSITIONAL, call)

    def _note_index(self, call: OperatorCall, index: Tensor) -> None:
        """Record that rows are selected by an index, unless each sample selects its own row."""
        marks = self._marks.get(index, ())
        if _NUMBERED not in marks:
            self._note(LOOKUP if _OF_BATCH in marks else JOINT, call)

    def _note(self, kind: str, call: OperatorCall) -> None:
        if (kind, call.name) not in self.findings:
            self.findings[kind, call.name] = Finding(kind, call.name, calling_line(sys._getframe(1)))
            if self._stops and kind != TOTAL:
                raise TraceStopped


def _selected_by(index: Tensor) -> str:
    """The mark of rows that an index selects."""
    return f"{_SELECTED}{id(index)}"


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
