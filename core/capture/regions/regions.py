"""Regions: parts of a step that stay Python, each as one operator of the captured graph.

Tracing ends where Python needs a tensor's value. A *module region* is the call of a module that needs one; the *tail*
of a step is everything after such a point outside of all modules. A region's Python runs on one stage, once for each
microbatch and with autograd enabled. It returns an additional tensor, its *ticket*, that holds what autograd saved for
its backward. Everything else is traced, cut and pipelined.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import RequestError
from ..graph.autograd_functions import NumberedObjects, autograd_in_kernel
from ..graph.randomness import KeyedRandom, random_key
from ..graph.rewrites import RULE
from ..python.changes import INTERNAL

Run = Callable[[list[Tensor]], list[Tensor]]
"""Takes a region's inputs, in order, and returns its results."""


@frozen
class TensorSpec:
    """Shape and dtype of a tensor that a region returns or reads.

    Args:
        shape, dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@define(eq=False)
class Region:
    """A region.

    Args:
        name: of the module, or "" for the tail.
        line: that needs a value.
        run: its Python.
        made: its results.
        trained: inputs that get a gradient, by position.
        draws: number of random draws.

    Attributes:
        autocast: a context with the autocasts in which it runs; set after capture.
    """

    name: str
    line: str
    run: Run
    made: tuple[TensorSpec, ...]
    trained: dict[int, TensorSpec]
    draws: int
    autocast: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, init=False)

    @property
    def _who(self) -> str:
        return f"module '{self.name}'" if self.name else "the step"

    def forward(self, given: Sequence[Tensor], key: Tensor | None, ordinal: int) -> list[Tensor]:
        """Its results and its ticket."""
        leaves = [tensor.detach().requires_grad_(i in self.trained) for i, tensor in enumerate(given)]
        with autograd_in_kernel(), self.autocast():
            found = self._drawn(list(leaves), key, ordinal)
        ticket = torch.zeros(1, dtype=torch.int64, device=given[0].device if given else None)
        ticket.kept = found, [leaves[i] for i in self.trained]  # type: ignore[attr-defined]
        return [*map(_own, found), ticket]

    def backward(self, gradients: Sequence[Tensor], ticket: Tensor) -> list[Tensor]:
        """Gradients of its trained inputs, from those of its results."""
        found, leaves = ticket.kept  # type: ignore[attr-defined]
        # The gradient of a loss is a number, and a loss may have shape (1,).
        pairs = [(f, g.expand_as(f)) for f, g in zip(found, gradients, strict=True) if f.requires_grad]
        if not pairs or not leaves:
            return [_no_gradient(leaf) for leaf in leaves]
        with autograd_in_kernel():
            flowed = torch.autograd.grad(
                [f for f, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, retain_graph=True
            )
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in flowed):
            raise RequestError(f"{self.line}: {self._who} has sparse gradients: {RULE}")
        return [
            _no_gradient(leaf) if gradient is None else _own(gradient)
            for leaf, gradient in zip(leaves, flowed, strict=True)
        ]

    def _drawn(self, given: list[Tensor], key: Tensor | None, ordinal: int) -> list[Tensor]:
        """Run it with keyed random numbers."""
        with KeyedRandom(random_key(0, 0, 0) if key is None else key, ordinal) as random:
            found = self.run(given)
        if self.name and random.ordinal - ordinal != self.draws:  # there are no draws after the tail
            raise RequestError(
                f"{self.line}: {self._who} draws {random.ordinal - ordinal} random tensors here and drew {self.draws} "
                "for the example: later random numbers would depend on it; draw the same number each time"
            )
        if (now := tuple(map(TensorSpec.like, found))) != self.made:
            raise RequestError(
                f"{self.line}: {self._who} returns tensors of shapes {[m.shape for m in now]} here and returned "
                f"{[m.shape for m in self.made]} for the example: its results must keep their shapes; move the line "
                "and what depends on it into one module"
            )
        return found


def _no_gradient(leaf: Tensor) -> Tensor:
    zeros = torch.zeros_like(leaf, requires_grad=False)
    zeros.is_no_gradient = True  # type: ignore[attr-defined]
    return zeros


def is_no_gradient(gradient: Tensor) -> bool:
    """Whether a gradient means None, as in eager PyTorch for a tensor that this run of the region did not use."""
    return hasattr(gradient, "is_no_gradient")


def _own(tensor: Tensor) -> Tensor:
    """A result that shares no memory with anything else, contiguous."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def trained(reads: Sequence[Tensor]) -> dict[int, TensorSpec]:
    """The inputs of a region that get a gradient, by position."""
    return {i: TensorSpec.like(tensor) for i, tensor in enumerate(reads) if tensor.requires_grad}


_regions: NumberedObjects[Region] = NumberedObjects()
_library = torch.library.Library("panpipe_region", "DEF")
_library.define("run(Tensor[] given, int number, Tensor? key, int ordinal) -> Tensor[]")
_library.define("backward(Tensor[] gradients, Tensor ticket, int number) -> Tensor[]")
_RUN, _BACKWARD = torch.ops.panpipe_region.run.default, torch.ops.panpipe_region.backward.default


def call_region(region: Region, given: list[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """Run a region as an operator, to be captured; return its results.

    Args:
        region: the region.
        given: its inputs.
        written: buffers; its last results are their new values, and are copied to them.
    """
    found = run_keyed(given, _regions.add(region), None, 0)[:-1]
    results = len(found) - len(written)
    for buffer, value in zip(written, found[results:], strict=True):
        buffer.copy_(value.detach())
    return found[:results]


def region_of(node: fx.Node) -> Region | None:
    """The region that a node runs, or None for an ordinary operator."""
    return _regions[node.args[1]] if runs_region(node) else None  # type: ignore[index]


def region_needed(node: fx.Node) -> Region | None:
    """The region that a node runs, or whose backward it runs, or None: a program with the node holds it."""
    places: dict[Any, int] = {_RUN: 1, _BACKWARD: 2}
    at = places.get(node.target)
    number: Any = None if at is None else node.args[at]
    return None if number is None else _regions[number]


def runs_region(node: fx.Node) -> bool:
    """Whether a node of a captured or traced graph runs a region."""
    return node.target is _RUN


def run_keyed(given: list[Tensor], number: int, key: Tensor | None, ordinal: int) -> list[Tensor]:
    """Run a region as an operator with random numbers from a key; return its results and its ticket."""
    found: list[Tensor] = torch.ops.panpipe_region.run(given, number, key, ordinal)
    return found


def _fake_run(given: list[Tensor], number: int, key: Tensor | None, ordinal: int) -> list[Tensor]:
    device = given[0].device if given else torch.device("cpu")
    return [*(made.empty(device) for made in _regions[number].made), torch.empty(1, dtype=torch.int64, device=device)]


def _fake_backward(gradients: list[Tensor], ticket: Tensor, number: int) -> list[Tensor]:
    return [made.empty(ticket.device) for made in _regions[number].trained.values()]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, ctx.number, _key, _ordinal = inputs
    ctx.count = len(given)
    ctx.save_for_backward(output[-1])


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor | None], None, None, None]:
    (ticket,) = ctx.saved_tensors
    starts = [gradient.contiguous() for gradient in gradients[:-1]]
    flowed = iter(torch.ops.panpipe_region.backward(starts, ticket, ctx.number))
    trained = _regions[ctx.number].trained
    return [next(flowed) if i in trained else None for i in range(ctx.count)], None, None, None


_library.impl(
    "run", lambda given, number, key, ordinal: _regions[number].forward(given, key, ordinal),
    "CompositeExplicitAutograd",
)  # fmt: skip
_library.impl(
    "backward", lambda gradients, ticket, number: _regions[number].backward(gradients, ticket),
    "CompositeExplicitAutograd",
)  # fmt: skip
torch.library.register_fake("panpipe_region::run", _fake_run, lib=_library)
torch.library.register_fake("panpipe_region::backward", _fake_backward, lib=_library)
torch.library.register_autograd("panpipe_region::run", _differentiate, setup_context=_save, lib=_library)


def copy_on_meta(module: nn.Module, foreign: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a module without data: its parameters and buffers are on the meta device.

    Its other tensors are not copied: the user may write into them between steps.

    Args:
        module: the module.
        foreign: identity of a tensor that is not the module's → its replacement in the copy.
    """
    memo: dict[int, Any] = dict(foreign)
    with _disable_current_modes():  # a step may be captured now; copies of fake tensors belong to that thread alone
        for tensor in (*module.parameters(), *module.buffers()):
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    for inner in module.modules():
        own = [held for name, held in vars(inner).items() if name not in INTERNAL]
        for tensor in pytree.tree_leaves(own):
            if isinstance(tensor, Tensor):
                memo.setdefault(id(tensor), tensor)
    return copy.deepcopy(module, memo)


@contextmanager
def forwards_replaced(
    model: nn.Module, names: Iterable[str], wrap: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """The context in which modules have other forwards.

    Args:
        model: contains the modules.
        names: of the modules.
        wrap: returns the other forward of a module, given its name and the module.
    """
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    own = {name: module.__dict__.get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = wrap(name, module)
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            if own[name] is not None:  # another program replaced it before
                module.forward = own[name]


CHEAP_BYTES = 1 << 16
"""Buffers up to this size count as written by every region that reads them, because only one run on the example is
observed, and another run may take another branch. A copy of one takes some microseconds."""


def may_be_written(buffer: Tensor) -> bool:
    """Whether a buffer of a region counts as written, even if the example's run did not write it."""
    return buffer.nbytes <= CHEAP_BYTES


class Copies:
    """Copies of a module on the meta device.

    A run puts its tensors into the copy, so no two threads may run the same one: devices that are threads profile all
    operators at the same time, and a module that is called twice may be in the stages of two of them.

    Args:
        template: a copy that is never run.
    """

    def __init__(self, template: nn.Module) -> None:
        self.template, self._free = template, list[nn.Module]()

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """The context in which a copy is this thread's alone."""
        try:
            own = self._free.pop()
        except IndexError:
            own = copy_on_meta(self.template, {})
        try:
            yield own
        finally:
            self._free.append(own)

    @contextmanager
    def running(self, who: str, state: dict[str, Tensor], written: Collection[str]) -> Iterator[nn.Module]:
        """The context of a run of a region.

        Args:
            who: the region's name, with its line.
            state: name of a parameter or buffer → the tensor of this run; afterwards the one that the run left.
            written: names of the buffers that count as written: the run gets clones of them.

        Raises:
            RequestError: it wrote another buffer, whose new value would be lost.
        """
        state.update({key: state[key].clone() for key in written})
        buffers = {name for name, _ in self.template.named_buffers()}.intersection(state).difference(written)
        before = {name: (state[name], state[name]._version) for name in buffers}
        with self.lent() as bare, _reparametrize_module(bare, state, tie_weights=True):
            yield bare
        for name, (tensor, version) in before.items():
            if state.get(name) is not tensor or tensor._version != version:
                raise RequestError(
                    f"{who} writes its buffer '{name}' here and did not for the example, and it is larger than "
                    f"{CHEAP_BYTES >> 10} KiB: write it in every call, with its own values if they do not change"
                )
