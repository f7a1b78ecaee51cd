"""Detects Python code that needs a tensor's value while a step is captured, when tensors have none.

A number that is read from a tensor is a `LateNumber`. Any other use of a value, such as a branch, stops capture.
It also finds which tensors are *constants*, computed from no parameter, batch or random number, such as a table of
positions: a step may keep these for its next run, because that run computes the same ones. What Python computes from
numbers and sizes alone, such as whether a mask that the step makes is a causal one, has the same value in each run with
the same sizes: where Python reads it, the calls that made it run again with real tensors (`KnownValues`).
"""

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import numpy
import torch
from attrs import define, field
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import guarding_hint_or_throw
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...tensor_metadata import METADATA_READS, memory_of
from .capture_errors import NeedsAutograd, NeedsValue, Refused
from .code_origin import is_own, is_users_own
from .late_numbers import LateNumber, kept_text
from .nesting import tensors_of
from .raising_branches import value_without_error
from .sparse_tensors import is_sparse

_Call = tuple[Callable[..., Any], Any, Any, Any]
"""A function of torch, its arguments, and its result."""
Number = Callable[[Any], Any]
"""Gives the number for a symbolic one."""


@define(eq=False)
class KnownValues:
    """The calls of a run of the step whose tensors depend on no parameter, batch or random number.

    Attributes:
        reads: for each value that Python read and that depends on symbolic sizes: whether other sizes give the same.
    """

    reads: list[Callable[[Number], bool]] = field(factory=list)
    _calls: list[_Call] = field(factory=list)

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Keep a call."""
        self._calls.append((func, args, kwargs, result))

    def read(self, func: Callable[..., Any], args: Any) -> Any:
        """What a function that reads values returns.

        Raises:
            Exception: the value depends on more than numbers and sizes, or cannot be computed on the host.
        """
        calls, symbols = tuple(self._calls), list[Any]()

        def hint(number: Any) -> Any:
            symbols.append(number)
            return guarding_hint_or_throw(number)

        found = _computed(calls, func, args, hint)
        if symbols and func is Tensor.item:
            raise NeedsValue("a number that depends on sizes is computed in each run")

        def same(number: Number) -> bool:
            with suppress(Exception):  # with these sizes a call fails
                again = _computed(calls, func, args, number)
                return bool(torch.equal(torch.as_tensor(again), torch.as_tensor(found)))
            return False

        if symbols:
            self.reads.append(same)
        return found


def _computed(calls: Sequence[_Call], func: Callable[..., Any], args: Any, number: Number) -> Any:
    """What a function returns after some calls, all with real tensors on the host."""
    real: dict[int, Tensor] = {}

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return real[id(leaf)]
        if isinstance(leaf, tuple):  # a torch.Size
            return tuple(map(argument, leaf))
        if isinstance(leaf, slice):
            return slice(*map(argument, (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, SymInt | SymFloat | SymBool):
            return number(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    arguments = partial(pytree.tree_map, argument)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for called, given, options, result in calls:
            if all(id(tensor) in real for tensor in tensors_of((given, options))):  # the values of a buffer are unknown
                made = called(
                    *arguments(given), **{**arguments(options), **dict.fromkeys({"device"} & {*options}, "cpu")}
                )
                real.update(zip(map(id, tensors_of(result)), tensors_of(made), strict=True))
            elif called.__name__.endswith("_") or "out" in options:  # it wrote values that are unknown
                memories = {memory_of(real[id(t)]) for t in tensors_of((given, options)) if id(t) in real}
                real = {key: tensor for key, tensor in real.items() if memory_of(tensor) not in memories}
        return func(*arguments(args))


@contextmanager
def unknown_masks_taken() -> Iterator[None]:
    """Within this context a transformer of torch takes a mask of unknown values as it is.

    With a causal one eager PyTorch lets the kernel make it, which is a hint for speed alone (``is_causal`` of
    `torch.nn.TransformerEncoder`).
    """
    detect: Callable[..., bool] = transformer._detect_is_causal_mask

    def detected(*args: Any, **options: Any) -> bool:
        try:
            return detect(*args, **options)
        except NeedsValue:
            return False

    with mock.patch.object(transformer, "_detect_is_causal_mask", detected):
        yield


_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__,
    torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero,
}  # fmt: skip
"""Functions that convert tensors to Python values."""


def reads_values(func: Any) -> bool:
    """Whether a function converts a tensor to a Python value."""
    return func in _READS


def is_unknown(value: Any) -> bool:
    """Whether a tensor has no value while a step is captured."""
    return isinstance(value, FakeTensor) and value.constant is None


class ValueWatch(TorchFunctionMode):
    """A mode in which a number read from a captured tensor is a `LateNumber`, and any other use of a value stops.

    Args:
        sizes: whether sizes that depend on values stop capture, too; capture supports some of them.
        constants: gets the constants: identity of a memory → a tensor with it, which keeps it alive.
        known: gets the calls that compute them.
        kept: fake modes of earlier runs of the step → the name of a value that they kept in Python. To compute with
            such a value is refused.
        drawn: `drawn_outside_of_torch` before the run, to find the line that changes it; None otherwise.

    Attributes:
        started: whether an operator has read a parameter.
        shown: whether a number that is not known was written into a text, as nan.
        over: whether this run has ended, and another one looks at what it kept.
    """

    def __init__(
        self,
        sizes: bool,
        constants: dict[int, Tensor],
        known: KnownValues,
        kept: Mapping[Any, str],
        drawn: int | None = None,
    ) -> None:
        super().__init__()
        self._sizes, self._constants, self._known, self._kept, self._drawn = sizes, constants, known, kept, drawn
        self.over = self.shown = self.started = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        self.started = self.started or any(isinstance(tensor, nn.Parameter) for tensor in given)
        if func == _GETS_DATA:
            return args[0].detach()  # tracing would record it as a constant
        if func in _READS and any(is_unknown(tensor) or not isinstance(tensor, FakeTensor) for tensor in given):
            return self._read(func, args)  # a tensor from outside has a value, but it may change between steps
        self._refuse(func, args, given)
        result = func(*args, **kwargs)
        self._note_constants(func, args, kwargs, given, result)
        if is_sparse(result):
            raise NeedsValue(f"{getattr(func, '__name__', func)} creates a sparse tensor, which is not captured")
        if self._sizes and any(map(_of_unknown_size, pytree.tree_leaves(result))):
            raise NeedsValue(f"the size of what {getattr(func, '__name__', func)} returns depends on values")
        return result

    def _refuse(self, func: Any, args: Any, given: Sequence[Tensor]) -> None:
        """Refuse a function that is not captured, or stop the capture."""
        if self._drawn is not None and self._drawn != drawn_outside_of_torch():
            raise Refused(DRAWS_OUTSIDE)
        self.refuse_read_texts(args)
        if _draws(func):
            _refuse_draws_after_a_seed()
        if func == _SETS_DATA and isinstance(args[0], nn.Parameter):
            raise Refused(
                "the step assigns .data of a parameter, and only the optimizer may change parameters in a step: "
                "write it after pipe.step(batch), under torch.no_grad(), or make it a buffer"
            )
        if func == _SETS_DATA:
            raise Refused("the step assigns .data, which cannot be captured: write into it by .copy_ under no_grad")
        if func in _NEED_VALUES or getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise NeedsValue(f"{func.__name__.lstrip('_')} needs the values of its lengths")
        if func in _DIFFERENTIATES:
            raise NeedsAutograd(f"{func.__name__} differentiates in the middle of the step")
        if getattr(func, "__module__", "") == "torch._functorch.predispatch":
            raise NeedsValue("torch.vmap and torch.func transform Python, which is not captured")
        for tensor in given if self._kept and func not in METADATA_READS else ():
            if isinstance(tensor, FakeTensor) and tensor.fake_mode in self._kept:
                raise Refused(kept_text("a tensor", self._kept[tensor.fake_mode]))

    def refuse_read_texts(self, values: Any) -> None:
        """Stop if the step reads a text with a number that is not known, as ``float(f"{loss.item():.2f}")`` does."""
        if self.shown and any(type(leaf) is float and math.isnan(leaf) for leaf in pytree.tree_leaves(values)):
            raise NeedsValue("a number here is read from a text with the value of a tensor")

    def _note_constants(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any) -> None:
        name = getattr(func, "__name__", "")
        sources = given[:1] if name in _AS_ANOTHER else () if name in _NO_VALUES else given
        constant = not _draws(func) and are_constants(sources, self._constants)
        for tensor in tensors_of(result):
            if constant:
                self._constants[memory_of(tensor)] = tensor
        if constant and func not in METADATA_READS:
            self._known.note(func, args, kwargs, result)
        if not constant:
            written = given[:1] if name == "__setitem__" or name.endswith("_") else []
            for tensor in (*written, *tensors_of(kwargs.get("out"))):
                self._constants.pop(memory_of(tensor), None)

    def _read(self, func: Any, args: Any) -> Any:
        tensor = args[0]
        if func not in (Tensor.__repr__, Tensor.__format__) and are_constants(args, self._constants):
            with suppress(Exception):  # it depends on a buffer, or cannot be computed on the host
                return self._known.read(func, args)
        if func is Tensor.__bool__ and tensor.numel() == 1 and (found := value_without_error(self.started)) is not None:
            return found
        if func is Tensor.__repr__:
            return f"tensor(nan, shape={tuple(tensor.shape)})"
        if tensor.numel() != 1 or tensor.is_complex() or func not in (Tensor.item, Tensor.__format__):
            raise NeedsValue(f"{getattr(func, '__name__', str(func)).strip('_')} needs the value of a tensor")
        value = tensor.detach().reshape(()).clone()  # the step may write the tensor later
        number = LateNumber(value.double() if value.is_floating_point() else value, self)  # as Python has them
        return number if func is Tensor.item else format(number, args[1])


def are_constants(value: Any, constants: Mapping[int, Tensor]) -> bool:
    """Whether all tensors of a nesting are constants, and no number was read from a tensor.

    Args:
        value: the nesting.
        constants: of a `ValueWatch`.
    """
    leaves = pytree.tree_leaves(value)
    return not any(
        type(leaf) is LateNumber or (isinstance(leaf, FakeTensor) and memory_of(leaf) not in constants)
        for leaf in leaves
    )


_AS_ANOTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""Functions that take no values of their second tensor."""
_NO_VALUES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
"""Functions that take no values of their tensors."""


DRAWS_OUTSIDE = (
    "the step draws random numbers from Python or numpy: in a captured step they would be constant; draw with torch, "
    "or give them with the batch"
)


def drawn_outside_of_torch() -> int:
    """A number that changes when Python or numpy draws a random number."""
    numpy_state: Any = numpy.random.get_state()
    return hash((random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]))


_GETS_DATA, _SETS_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


def _of_unknown_size(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


_NEED_VALUES = {torch.nn.functional.ctc_loss, torch.ctc_loss}
_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}

_SETS = frozenset({"manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"})
_DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "rrelu", "gumbel_softmax", "scaled_dot_product_attention",
})  # fmt: skip


def _draws(func: Any) -> bool:
    """Whether a function of torch may draw random numbers, by its name."""
    name = getattr(func, "__name__", "")
    return name in _DRAWS or "dropout" in name


def _refuse_draws_after_a_seed() -> None:
    """Refuse a draw in a function of the user's, or called by one, that sets a seed: keyed streams do not depend on it.

    A seed that is set before training, and a generator that was made before it, are allowed.

    Raises:
        Refused: there is such a function on the way from the step.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and not is_own(frame.f_code.co_filename):
        code = frame.f_code
        if is_users_own(code.co_filename) and not _SETS.isdisjoint(code.co_names):
            raise Refused(
                "the step sets the seed or the state of a random number generator, and then draws: eager PyTorch draws "
                "the same numbers in each step, a captured step would not; set the seed before training, or give the "
                "numbers with the batch"
            )
        frame = frame.f_back
