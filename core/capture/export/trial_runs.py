"""Consecutive runs of a step on fake tensors: each starts with the Python state that the one before left."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from ...errors import RequestError
from ..graph.autograd_functions import without_checkpoints
from ..python.foreign_gradients import with_gradients_from
from ..python.isolation import isolated
from ..python.reachable.reach import reach
from ..python.reached import Reached
from ..python.references import references_followed
from ..values.containers import BatchNesting, flatten_batch
from ..values.fake_tensors import fake_state, have_equal_shapes
from ..values.placeholder_results import PlaceholderResults
from ..values.placeholder_values import PlaceholderValues
from ..values.results import plain_result
from .constant_values import ConstantValues
from .kept_tensors import KeptTensors
from .operand_origins import Operands
from .run_record import RecordedOperator, Recording, outside_noted

NUMBER = 1.0
"""Result of ``item()`` in runs that are compared."""


@frozen
class Leaf:
    """The properties of a tensor of a batch that matter for capture."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


Leaves = tuple[Any, ...]
"""The leaves of a batch, with a `Leaf` for each tensor."""


def leaves_of(batch: Any) -> tuple[Leaves, BatchNesting]:
    """The leaves of a batch, with a `Leaf` for each tensor, and its nesting."""
    leaves, nesting = flatten_batch(batch)
    return tuple(Leaf(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves), nesting


@define(eq=False)
class TrialRuns:
    """Runs of a step on fake tensors.

    Args:
        model, step: the user's; the model does not change.
        nesting: of the batches.
        device: on which the step will run.
        gradients: whether a backward follows.
        reached: what the step reaches.

    Attributes:
        gave_number: whether a run needed a number.
        given: leaf tensors that would get a gradient; found if there are such tensors outside of the model.
        read_kept: the user's line that reads a tensor of an earlier run, or "".
        ended: whether every run reached the step's end.
    """

    model: nn.Module
    step: Any
    nesting: BatchNesting
    device: torch.device
    gradients: bool
    reached: Reached
    gave_number: bool = field(default=False, init=False)
    given: list[Tensor] = field(factory=list, init=False)
    read_kept: str = field(default="", init=False)
    ended: bool = field(default=True, init=False)
    _mode: FakeTensorMode = field(init=False)
    _state: dict[str, Tensor] = field(init=False)
    _real: dict[str, Tensor] = field(factory=dict, init=False)
    _kept: KeptTensors = field(init=False)
    _batches: dict[Leaves, list[Any]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # They require gradients as the model's do without gradients, too: the step may read that.
        _, self._state = fake_state(self.model, self._mode, self.device, gradients=True)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._kept = KeptTensors(tensor for name, tensor in self._state.items() if name in parameters)

    def now(self) -> Reached:
        """What the step reaches now."""
        return reach(self.model, self.step)

    def run(
        self, leaves: Leaves, number: float = NUMBER, values: ConstantValues | None = None
    ) -> list[RecordedOperator]:
        """Run the step, to its end or to the first operation that does not run on fake tensors.

        Args:
            leaves: of the batch.
            number: result of ``item()``.
            values: to compare constants by values; see `Recording`.
        """
        fakes = self._fakes(leaves)
        tensors = {place: fake for place, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        operands = Operands([*tensors.items(), *self.model.named_parameters(), *self.model.named_buffers()])
        recording, watch = Recording(self._kept, operands, values), _Values(number)
        placeholders = PlaceholderValues(number)
        self._kept.begin(tensors.values(), self._buffers())
        try:
            with outside_noted(recording.ran, self.reached.foreign), self._mode, watch, placeholders, recording:
                result = self.step(self.model, self.nesting.batch(fakes))
            if self.reached.trained and self.gradients:
                found = plain_result(result)
                self.given.extend(with_gradients_from(found[0] if isinstance(found, tuple | list) else found))
        except Exception:  # capture itself refuses operations that are not allowed
            self.ended = False
        self.gave_number |= watch.gave_number or placeholders.gave_number
        self.read_kept = self.read_kept or recording.read_kept
        return recording.ran

    def values(self) -> ConstantValues:
        """The values of the buffers that no run so far has written, in place or by an assignment.

        From now on the other buffers are not constants.
        """
        found, now = ConstantValues(), dict(self.model.named_buffers(remove_duplicate=False))
        for name, tensor in self._real.items():
            fake, later = self._state[name], now.get(name)
            assigned = later is not fake and later is not None and have_equal_shapes(later, fake)
            if assigned or self._kept.is_written(fake):
                self._kept.give([fake])
            elif not tensor.is_meta:
                found.known[fake] = tensor
        return found

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The context of some runs: parameters and buffers are fake, and changes of Python objects are undone."""
        failure: RequestError | None = None
        self._real = dict(self.model.named_buffers(remove_duplicate=False))
        with ExitStack() as stack:
            stack.enter_context(isolated(self.model, self.reached))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(_reparametrize_module(self.model, dict(self._state)))
            stack.enter_context(references_followed(self.model, self.reached))
            stack.enter_context(without_checkpoints())
            try:
                yield
            except RequestError as error:  # `isolated` suppresses all exceptions
                failure = error
        if failure is not None:
            raise failure

    def _fakes(self, leaves: Leaves) -> Sequence[Any]:
        if leaves not in self._batches:
            with self._mode:
                self._batches[leaves] = [
                    torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self.device)
                    if isinstance(x, Leaf) else x
                    for x in leaves
                ]  # fmt: skip
        return self._batches[leaves]

    def _buffers(self) -> Iterator[Tensor]:
        """The model's buffers, without those that were replaced by a tensor of another shape, as a cache that grew."""
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            mine = self._state.get(name)
            if mine is not None and have_equal_shapes(mine, buffer):
                yield buffer


class _Values(PlaceholderResults):
    """Gives a step placeholder values with a given number.

    Args:
        number: the value of every number.

    Attributes:
        gave_number: whether the step needed one.
    """

    def __init__(self, number: float) -> None:
        super().__init__(truth=False)
        self._number = number
        self.gave_number = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool:
            self.gave_number = True
            whole = 0 if math.isnan(self._number) else int(self._number)
            return self._number if args[0].is_floating_point() else whole
        return super().__torch_dispatch__(func, types, args, kwargs)
