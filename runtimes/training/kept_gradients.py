"""Gradients that wait for an update after ``step(batch, update=False)``: the user's ``zero_grad()`` would drop them.

In one process what is dropped is no part of the next update. Here the batches that wait are also part of the mean that
the update takes, so gradients without them would be too small.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from ...core.errors import RequestError
from ..optimizer.state import StageState


class KeptGradients:
    """The gradients that wait now.

    Args:
        states: of the stages here.
    """

    def __init__(self, states: Mapping[int, StageState]) -> None:
        users: dict[str, nn.Parameter] = {}  # of a tied weight the first one here is the user's
        for _, state in sorted(states.items()):
            users = {**state.parameters, **users}
        self._held = [(p, p.grad, p.grad._version) for p in users.values() if p.grad is not None]

    def refuse_cleared(self) -> None:
        """Refuse to go on where all of them were set to None or zero since; some of them may be.

        Raises:
            RequestError: they were.
        """
        if self._held and all(_cleared(*held) for held in self._held):
            raise RequestError(
                "zero_grad() cleared gradients that wait for an update since step(batch, update=False), and their "
                "batches count in its mean: leave zero_grad() out, every update clears gradients itself"
            )


def _cleared(parameter: nn.Parameter, kept: Tensor, version: int) -> bool:
    now = parameter.grad
    return now is None or ((now is not kept or now._version != version) and not now.any())
