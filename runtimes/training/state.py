"""What a pipeline keeps between two steps, in addition to the tensors of its stages.

If the user's ``zero_grad()`` clears gradients accumulated by ``step(batch, update=False)``, that is an error: in one
process, the next update would not contain them. Here the update divides by the number of all accumulated
batches, so it would be too small. Where replicas share gradients, or an optimizer, ``grad`` of parameters, or of their
slices in the optimizer, has no value to compare: between these steps it is a `SharedGradient`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from ...core.errors import RequestError
from ...core.tensor_metadata import METADATA_FUNCTIONS, first_of, name_of
from ..metrics import LazyValue
from ..update.stage_state import StageState

CLEARED = (
    "zero_grad() cleared the gradients that step(batch, update=False) had accumulated, but their batches count in the "
    "mean of the next update: remove the call of zero_grad(); every update clears gradients itself"
)
PARTS = (
    "with shard='gradients' or 'parameters' each replica keeps a part of the sums; use Memory(shard='optimizer') to "
    "read or change gradients between step(batch, update=False) and the update"
)
SLICE = (
    "with shard='optimizer' a slice in an optimizer has no gradient before the update; read or change that of the "
    "parameter in the model"
)
_ZERO = ("zero_", "_foreach_zero_")


class SharedGradient(Tensor):
    """What ``grad`` is between steps if this replica does not have the gradient's values.

    Its shape can be read; any use of its values is refused.

    Attributes:
        parameter_name: the parameter's qualified name.
        why: it has no value.
    """

    parameter_name: str
    why: str

    @classmethod
    def of(cls, parameter: nn.Parameter, name: str, why: str = PARTS) -> "SharedGradient":
        """One with the shape of a parameter, which takes no memory.

        Args:
            why: it has no value, and what to do, for messages.
        """
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: SharedGradient = zero.expand(parameter.shape).as_subclass(cls)
        made.parameter_name, made.why = name, why
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = name_of(func)
        if what in _ZERO:
            raise RequestError(CLEARED)
        first = first_of(cls, (args, kwargs or {}))
        assert first is not None
        first.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        """Raise an error.

        Args:
            what: what was done with it.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"'{what}' of the gradient of '{self.parameter_name}', which waits for an update, would be lost or wrong: "
            f"{self.why}, or use Update(clip_norm=) to clip all of them"
        )

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of '{self.parameter_name}', shared by replicas>"


class KeptGradients:
    """The accumulated gradients."""

    def __init__(self, states: Mapping[int, StageState]) -> None:
        users: dict[str, nn.Parameter] = {}  # of a tied weight the first one here is the user's
        self._shared: list[tuple[nn.Parameter, SharedGradient]] = []
        for _, state in sorted(states.items()):
            users = {**(state.parameters if state.shared is None else {}), **users}
            self._shared += _without_value(state)
        self._held = [(p, p.grad, p.grad._version) for p in users.values() if p.grad is not None]
        with DisableTorchFunctionSubclass():  # parameters that replicas share refuse uses between steps
            for parameter, gradient in self._shared:
                parameter.grad = gradient

    def refuse_cleared(self) -> None:
        """Raise an error if all of them were set to None or zero, or a shared one was set to anything.

        Raises:
            RequestError: they were.
        """
        for parameter, gradient in self._shared:
            with DisableTorchFunctionSubclass():
                found, parameter.grad = parameter.grad, None
            if found is None:
                raise RequestError(CLEARED)
            if found is not gradient:
                gradient.refuse("grad")
        if self._held and all(_cleared(*held) for held in self._held):
            raise RequestError(CLEARED)


def _without_value(state: StageState) -> list[tuple[nn.Parameter, SharedGradient]]:
    """The parameters and slices whose accumulated gradient is not in ``grad``, each with what is set there instead."""
    if state.sharing is None:
        return []
    values, scatter = state.shards.values, state.scatter
    if scatter is None:
        waiting = [name for name, p in state.trained.items() if p.grad is not None and name in values]
        return [(values[name], SharedGradient.of(values[name], name, SLICE)) for name in waiting]
    reached = {name: parameter for name, parameter in state.trained.items() if parameter in scatter.reached}
    users = [*reached.items(), *((name, values[name]) for name in reached if name in values)]
    return [(parameter, SharedGradient.of(parameter, name, PARTS)) for name, parameter in users]


def _cleared(parameter: nn.Parameter, kept: Tensor, version: int) -> bool:
    now = parameter.grad
    return now is None or ((now is not kept or now._version != version) and not now.any())


PROGRESS = ("steps", "updates", "evaluations", "seed")
"""The fields of the state that a checkpoint contains: random numbers depend on them."""


@frozen
class Accumulated:
    """Batches whose gradients are accumulated for a later update.

    Args:
        samples: of the first batch; the sizes of the others are relative to it.
        divisor: divisor of the accumulated gradients: the sum of the step's weights, or of the relative sizes of the
            batches.
        scale: the factor on all their losses, fixed when the first batch ran; None for 1.
        finite: whether all their losses are finite, if updates depend on it.
        kept: the gradients; None before the first batch has run.
    """

    samples: int
    divisor: float
    scale: float | None
    finite: bool = True
    kept: KeptGradients | None = field(default=None, repr=False)


@define(eq=False)
class PipelineState:
    """The state of a pipeline between two steps.

    Args:
        steps: batches so far.
        updates: optimizer steps so far; skipped ones do not count.
        evaluations: forwards without an update so far; they have random numbers of their own.
        visits: calls of `panpipe.weights.on_parameters` since the last step.
        accumulated: the batches whose gradients wait for an update; None if no gradients wait.
        norm: the global norm of the last update's gradients, before clipping; None without ``clip_norm``.
        skipped: whether the last update was skipped because a gradient or the loss was not finite.
        not_finite: how many last steps in a row had a loss or a norm that is not finite.
        metrics: the other parts of the last batch's result.
    """

    seed: int = 0
    steps: int = 0
    updates: int = 0
    evaluations: int = 0
    visits: int = 0
    accumulated: Accumulated | None = None
    norm: Tensor | None = None
    skipped: bool = False
    not_finite: int = 0
    metrics: LazyValue[dict[str, float]] = field(factory=lambda: LazyValue(dict), repr=False)
