"""Detects that the user's ``zero_grad()`` cleared gradients accumulated by ``step(batch, update=False)``.

In one process, the next update would not contain them. Here the update divides by the number of all accumulated
batches, so it would be too small. Where replicas share gradients, or an optimizer, ``grad`` of parameters, or of their
slices in the optimizer, has no value to compare: between these steps it is a `SharedGradient`.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from ...core.errors import RequestError
from ..optimizer.stage_state import StageState
from .shared_gradient import CLEARED, PARTS, SLICE, SharedGradient


class KeptGradients:
    """The accumulated gradients.

    Args:
        states: stage of this process → its parameters.
    """

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
