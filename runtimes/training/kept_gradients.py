"""Detects that the user's ``zero_grad()`` cleared gradients accumulated by ``step(batch, update=False)``.

In one process, the next update would not contain them. Here the update divides by the number of all accumulated
batches, so it would be too small.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from ...core.errors import RequestError
from ..optimizer.stage_state import StageState


class KeptGradients:
    """The accumulated gradients.

    Args:
        states: stage of this process → its parameters.
    """

    def __init__(self, states: Mapping[int, StageState]) -> None:
        users: dict[str, nn.Parameter] = {}  # of a tied weight the first one here is the user's
        for _, state in sorted(states.items()):
            users = {**state.parameters, **users}
        self._held = [(p, p.grad, p.grad._version) for p in users.values() if p.grad is not None]

    def refuse_cleared(self) -> None:
        """Raise an error if all of them were set to None or zero; only some of them may be.

        Raises:
            RequestError: all were.
        """
        if self._held and all(_cleared(*held) for held in self._held):
            raise RequestError(
                "zero_grad() cleared the gradients that step(batch, update=False) had accumulated, but their batches "
                "count in the mean of the next update: remove the call of zero_grad(); every update clears gradients "
                "itself"
            )


def _cleared(parameter: nn.Parameter, kept: Tensor, version: int) -> bool:
    now = parameter.grad
    return now is None or ((now is not kept or now._version != version) and not now.any())
