"""A stand-in for a stage's optimizer: it steps copies, so that a rehearsed step has STEP."""

from collections.abc import Mapping

from torch import nn

from .optimizers import OptimizerFactory, stage_optimizer


class StandIn:
    """An optimizer of copies.

    Args:
        updated: what the stage's optimizer steps: its parameters, or this replica's slices of them. They only give
            values and gradients.
        make: creates the optimizer.
    """

    def __init__(self, updated: Mapping[str, nn.Parameter], make: OptimizerFactory) -> None:
        self._updated = {name: parameter for name, parameter in updated.items() if parameter.requires_grad}
        self._copies = {name: nn.Parameter(p.detach().clone()) for name, p in self._updated.items()}
        self._optimizer = stage_optimizer(make, list(self._copies.items())) if self._copies else None

    def step(self) -> None:
        """Step the copies, with the gradients that their originals have now."""
        if self._optimizer is None:
            return
        for name, copy in self._copies.items():
            copy.grad = self._updated[name].grad
        self._optimizer.step()
        for copy in self._copies.values():
            copy.grad = None
