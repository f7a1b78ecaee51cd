"""An optimizer over the whole model, as frameworks create it, whose options the stages' optimizers use.

A framework creates one optimizer with all parameters, and its schedulers write learning rates into its groups. A
pipeline has one optimizer for each stage. So the framework's optimizer keeps the groups and their options, and its
``step`` does nothing, because the pipeline's step has already updated the parameters.

framework ──▶ groups and options of ModelOptimizer ── before each step ──▶ the stages' optimizers
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..runtimes.update.optimizers import GivenOptimizer


class ModelOptimizer(Optimizer):
    """The optimizer that a framework sees: groups and options of a given one; its updates are the pipeline's.

    Args:
        given: over parameters of the model; it has not stepped yet, or it has the state of a checkpoint.
        model: the model.

    Attributes:
        stages: creates the optimizers of the stages, as ``optimizer=`` of ``panpipe.pipeline``.

    Raises:
        RequestError: it takes a parameter that the model does not have.
    """

    def __init__(self, given: Optimizer, model: nn.Module) -> None:
        self._given = given
        super().__init__(given.param_groups, given.defaults)
        self._share()
        self.stages = GivenOptimizer(given, model)

    def _share(self) -> None:
        """Use the same groups and state objects as the given optimizer, because the user's schedulers write to them."""
        self.param_groups, self.state = self._given.param_groups, self._given.state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the options of groups, and state for stages that are not built yet."""
        self._given.load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update nothing: the pipeline's step does. A closure is called; it runs that step."""
        self._given._opt_called = True  # type: ignore[attr-defined] # the given optimizer's schedulers read it
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear nothing: the pipeline clears gradients after its update."""
