"""Whether a step relates the samples of a batch, from the shapes of its operators.

A step runs on fake tensors with a number of samples that has a prime factor which no other size has. A dimension whose
size is divisible by it *carries* samples. `RowWatch` records the operators that relate them:

    sequence   relates neighbours: attention, convolution, recurrence, pooling along samples
    lookup     reads samples that values of the batch select, such as table[ids]
    part       takes some of the samples, or groups of them
    joint      relates samples in another way: all pairs, a mean over weights, a root of a mean

The first two cannot be cut. The others may change the loss: `part` and `joint` are candidates, which both values decide
(see `runtimes/batch/losses.py`), so a rule may find too much. A mean over samples relates nothing. BatchNorm
computes statistics over all dimensions but one, and is documented elsewhere.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..graph.nodes import arguments_by_name
from ..values.nesting import tensors_of
from ..values.user_lines import calling_line, message_start

_MAX_OPERATORS = 50_000
"""Largest number of operators of a trace: a loop that waits for a value, which fake tensors do not have, never ends."""

_UNKNOWN_ROWS = 7
"""Number of rows of a selection that depends on values; a prime, so that it is no other size."""

SEQUENCE, LOOKUP, PART, JOINT = "sequence", "lookup", "part", "joint"

_NUMBERED, _OF_BATCH, _MEAN, _SUM, _SHARES = "row numbers", "integers of the batch", "mean", "sum", "shares"
"""Marks of tensors in a trace:

    row numbers              the number of each sample, or of some selected ones
    integers of the batch    integers that the batch has, or computed from these: they may be indices
    mean, sum                reduced over all samples, by a mean or in another way
    shares                   a softmax along samples, as attention has
"""

_COPIES = {"clone", "contiguous", "copy_", "_to_copy", "lift_fresh", "repeat", "cat", "stack", "expand_copy", "alias"}
_NEW = ("zeros", "ones", "empty", "full", "rand", "new_", "zero_", "fill_", "normal", "uniform", "bernoulli",
        "native_dropout", "exponential_", "random_")  # fmt: skip
_MEANS = {"mean", "nanmean", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward",
          "nll_loss2d_forward", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward",
          "binary_cross_entropy_with_logits", "l1_loss", "kl_div"}  # fmt: skip
_LINEAR = {"add", "sub", "neg", "mul", "div", "rsub", "add_", "sub_", "mul_", "div_", "sum", "mean", *_COPIES}
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "linear": (0, None),
             "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "_addmm_activation": (1, 2),
             "_grouped_mm": (0, 1)}  # fmt: skip
"""Matrix products → positions of the two arguments; None for a weight."""
_ALONG = {"softmax", "_softmax", "_log_softmax", "log_softmax", "_safe_softmax", "logcumsumexp", "cumsum", "cumprod",
          "cummax", "cummin", "cumsum_", "flip", "roll", "sort", "topk", "argsort", "kthvalue", "mode", "renorm",
          "median", "msort", "glu", "_fft_c2c", "_fft_r2c", "_fft_c2r", "unique_dim", "unique_consecutive"}  # fmt: skip
"""Depend on the other values along a dimension."""
_BY_INDEX = ("gather", "index_", "scatter")
_SPATIAL = ("max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_", "reflection_pad", "im2col",
            "replication_pad", "col2im", "grid_sampler", "pixel_shuffle", "pixel_unshuffle")  # fmt: skip
"""Depend on neighbours along the last dimensions."""


@frozen
class Finding:
    """An operator that relates samples.

    Args:
        kind: `SEQUENCE`, `LOOKUP`, `PART` or `JOINT`.
        operator: its name.
        line: of the user's code, or "".
    """

    kind: str
    operator: str
    line: str

    def __str__(self) -> str:
        return message_start(self.line) + self.operator


class RowWatch(TorchDispatchMode):
    """A mode that watches a step on fake tensors, with a number of samples that is a multiple of a prime.

    Operators whose result depends on values return placeholders, so that the step continues: numbers are 0 or 1;
    selections have some rows, or all of them if every bool is True.

    Args:
        prime: divides no other size.
        rows: the number of samples.
        truth: the value of every bool.
        batch: its tensors.
        holds: whether an integer tensor of the real batch holds a number.

    Attributes:
        findings: operators that relate samples, each kind of each operator once.
    """

    def __init__(
        self, prime: int, rows: int, truth: bool, batch: Sequence[Tensor], holds: Callable[[int], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prime, self._rows, self._truth, self._holds = prime, rows, truth, holds
        self._count = 0
        self.findings: dict[tuple[str, str], Finding] = {}
        self._sum: Finding | None = None
        self._call: Any = None
        self._marks: Any = WeakIdKeyDictionary()
        self._mark([tensor for tensor in batch if _is_integer(tensor)], _OF_BATCH)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query of torch's own C++ code, in which an error would end the process
            return func(*args, **kwargs)
        self._count += 1
        if self._count > _MAX_OPERATORS:
            raise RuntimeError(f"the step runs more than {_MAX_OPERATORS} operators")
        given = tensors_of((args, kwargs))
        name = func._schema.name.partition("::")[2]
        if given and (found := self._of_unknown_value(name, args)) is not NotImplemented:
            return found
        if name == "_grouped_mm" and args[0].ndim == 2 and args[1].ndim == 3:  # its fake form supports bfloat16 only
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            args = (args[0], self._with_row_numbers(args[1]), *args[2:])
        result = _counts(*args, **kwargs) if name == "bincount" else func(*args, **kwargs)
        if made := tensors_of(result):
            if any(self._has(t, _OF_BATCH) for t in given):
                self._mark(filter(_is_integer, made), _OF_BATCH)
            self._call = func, name, args, arguments_by_name(func, args, kwargs), given, made
            kind = self._relation()
            if kind is not None and (kind, name) not in self.findings:
                self.findings[kind, name] = Finding(kind, name, calling_line(sys._getframe(1)))
        return result

    def _of_unknown_value(self, name: str, args: Any) -> Any:
        """A placeholder for the result of an operator that depends on values; `NotImplemented` for others."""
        tensor = args[0]
        if name == "_local_scalar_dense":
            return self._truth if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        if name == "equal":
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
        rows = tensor.numel() if self._truth else self._rows if self._carried(tensor) else _UNKNOWN_ROWS
        found = tensor.new_empty((rows, *rest), dtype=dtype)
        self._mark([found], _NUMBERED)
        return found

    def _with_row_numbers(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which masks are replaced by row numbers of the selected rows."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                found += [self._selected(index, (), torch.int64)] * index.ndim
            else:
                found.append(index)
        return found

    def note_results(self, results: Sequence[Tensor]) -> None:
        """Called with the tensors that the step returns: a sum over samples is not the mean of the microbatches'."""
        if self._sum is not None and any(self._has(t, _SUM) for t in results):
            self.findings[JOINT, self._sum.operator] = self._sum

    def note_recurrence(self, name: str, given: Tensor, batch_first: bool) -> None:
        """Called for every recurrent layer, which is many operators, with its input."""
        if (1 if batch_first and given.ndim == 3 else 0) in self._carried(given):
            self.findings[SEQUENCE, name] = Finding(SEQUENCE, name, calling_line(sys._getframe(1)))

    def _relation(self) -> str | None:
        """The kind of relation between samples that the operator computes, or None. Marks its results."""
        func, name, args, _, given, made = self._call
        square = self._prime**2
        if _products(made, square) and not _products(given, square):
            return JOINT  # all pairs
        carrying = [t for t in given if self._carried(t)]
        if not carrying:
            return self._of_reduced()
        if any(self._has(t, _MEAN, _SUM) for t in given) and not name.startswith(_NEW):
            return JOINT
        kept, pointwise = func.is_view or name in _COPIES, torch.Tag.pointwise in func.tags
        if any(self._has(t, _SHARES) for t in given) and (kept or pointwise or "dropout" in name):
            self._mark(made, _SHARES)
        if any(self._has(t, _NUMBERED) for t in carrying) and (kept or pointwise):
            self._mark(made, _NUMBERED)
            if pointwise and any(t.numel() > 1 and not self._has(t, _NUMBERED) for t in given):
                return JOINT
        first = args[0] if args and isinstance(args[0], Tensor) else given[0]
        found = None if pointwise or kept else self._of_layer(first, self._carried(first))
        return found or self._of_lost(kept)

    def _of_reduced(self) -> str | None:
        """Of an operator without samples among its inputs: a mean over samples may be scaled and added."""
        func, name, _, _, given, made = self._call
        if name in ("arange", "linspace") and self._carried(made[0]):
            self._mark(made, _NUMBERED)
        reduced = [t for t in given if self._has(t, _MEAN, _SUM)]
        if not reduced:
            return None
        scaled = len(reduced) == 1 and (name[:3] == "mul" or reduced[0] is given[0])
        scaled = scaled or not name.startswith(("mul", "div"))
        if not scaled or not (func.is_view or name in _LINEAR):
            return JOINT
        for mark in (_MEAN, _SUM):
            if any(self._has(t, mark) for t in reduced):
                self._mark(made, mark)
        return None

    def _of_lost(self, kept: bool) -> str | None:
        """Of an operator whose results have no samples, or some of them."""
        func, name, _, named, _, made = self._call
        if name.startswith(_NEW):
            return None
        if func.is_view and any(t.shape[d] % self._rows for t in made for d in self._carried(t)):
            return PART
        lost = [t for t in made if not self._carried(t) and t.numel()]
        if not lost or (self._carried(made[0]) and not kept):  # further results, such as statistics of BatchNorm
            return None
        if kept:
            return PART
        if name in _MEANS and named.get("reduction", 1) == 1:
            self._mark(lost, _MEAN)
            weighted = named.get("weight") is not None or self._holds(named.get("ignore_index", -1))
            return JOINT if name.startswith("nll_loss") and weighted else None
        self._mark(lost, _SUM)
        self._sum = self._sum or Finding(JOINT, name, calling_line(sys._getframe(1)))
        return None

    def _of_layer(self, first: Tensor, where: list[int]) -> str | None:  # noqa: PLR0911, PLR0912 -- one rule each
        """Of an operator that treats dimensions differently; ``where``: those of its first argument with samples."""
        _, name, args, named, _, _ = self._call
        if name in _PRODUCTS:
            one, other = _PRODUCTS[name]
            ends = [(args[one], -1)] + ([] if other is None else [(args[other], max(args[other].ndim - 2, 0))])
            if not any(d % t.ndim in self._carried(t) for t, d in ends):
                return None
            return SEQUENCE if self._has(args[one], _SHARES) else JOINT
        if name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
            offsets = named.get("offsets")
            if offsets is not None and not self._has(offsets, _NUMBERED):
                return LOOKUP if self._carried(offsets) or self._carried(named["indices"]) else None
            return self._by(named["indices"]) if where else None
        if name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for d, index in enumerate(named["indices"]) if isinstance(index, Tensor) and d in where]
            return next(filter(None, map(self._by, indices)), None)
        if name.startswith(_BY_INDEX):
            if named["dim"] % max(first.ndim, 1) in where:
                return self._by(named["index"])
            own = bool(where) and not (name.startswith("index_") and self._carried(named["index"]))
            return None if own or name in ("gather", "index_select") else JOINT
        if name.startswith("nll_loss") and min(1, first.ndim - 1) in where:
            return self._by(named["target"])
        if name in _ALONG:
            dims = named.get("dim", -1)
            dims = [dims] if isinstance(dims, int) else [-1] if dims is None else list(dims)
            if not any(d % max(first.ndim, 1) in where for d in dims):
                return None
            if name in ("softmax", "_softmax", "_safe_softmax"):
                self._mark(self._call[-1], _SHARES)
            return JOINT
        if "layer_norm" in name or "rms_norm" in name:
            return JOINT if any(d >= first.ndim - len(named["normalized_shape"]) for d in where) else None
        if name.startswith("masked_scatter"):
            return JOINT
        return SEQUENCE if self._is_along(first, where) else None

    def _is_along(self, first: Tensor, where: list[int]) -> bool:
        """Whether a layer relates neighbours along samples."""
        _, name, _, named, given, _ = self._call
        if "convolution" in name:
            grouped = (named.get("groups") or 1) % self._prime == 0  # a filter of its own for each sample
            layers = 2 if name.endswith("backward") else 1  # of a backward, the gradient and the input
            apart = all(d == 0 for t in given[:layers] for d in self._carried(t))
            return not grouped and (not apart or any(map(self._carried, given[layers:])))
        if name.startswith(_SPATIAL):
            digits = [int(c) for c in name if c.isdigit()]
            return any(d >= first.ndim - (digits[-1] if digits else 2) for d in where)
        if "scaled_dot_product" in name or "_attention_forward" in name:
            return any(t.ndim - 2 in self._carried(t) for t in given[:3])
        return False

    def _by(self, index: Tensor) -> str | None:
        """The kind of a selection of samples, unless each one selects its own."""
        if self._has(index, _NUMBERED):
            return None
        return LOOKUP if self._has(index, _OF_BATCH) else JOINT

    def _carried(self, tensor: Tensor) -> list[int]:
        """Dimensions that carry samples."""
        return [d for d, size in enumerate(tensor.shape) if size and size % self._prime == 0]

    def _has(self, tensor: Tensor, *marks: str) -> bool:
        return not self._marks.get(tensor, frozenset()).isdisjoint(marks)

    def _mark(self, tensors: Any, mark: str) -> None:
        for tensor in tensors:
            self._marks[tensor] = self._marks.get(tensor, frozenset()) | {mark}


def _products(tensors: Sequence[Tensor], square: int) -> bool:
    return any(t.numel() and t.numel() % square == 0 for t in tensors)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _counts(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """A placeholder for counts of each value, which are as many as ``minlength`` where the values are below it."""
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return values.new_empty((max(minlength, 1),), dtype=kind)
