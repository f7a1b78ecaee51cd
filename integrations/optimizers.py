"""An optimizer over the whole model, as frameworks create it, whose options the stages' optimizers use.

A framework creates one optimizer with all parameters, and its schedulers write learning rates into its groups. A
pipeline has one optimizer for each stage. So the framework's optimizer keeps the groups and their options, and its
``step`` does nothing, because the pipeline's step has already updated the parameters.

framework ──▶ groups and options of ModelOptimizer ── before each step ──▶ the stages' optimizers
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import RequestError
from ..runtimes.optimizer.optimizers import MEMBERS, OptimizerFactory
from ..runtimes.pipeline import Pipeline


class ModelOptimizer(Optimizer):
    """The optimizer that a framework sees: groups and options of a given one; its updates are the pipeline's.

    Args:
        given: over parameters of the model; it has not stepped yet, or it has the state of a checkpoint.
        model: the model.

    Raises:
        RequestError: it takes a parameter that the model does not have.
    """

    def __init__(self, given: Optimizer, model: nn.Module) -> None:
        self._given, self._kind = given, type(given)
        super().__init__(given.param_groups, given.defaults)
        self._share()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stray = next((p for group in self.param_groups for p in group["params"] if id(p) not in names), None)
        if stray is not None:
            raise RequestError(
                f"{self._kind.__name__} takes a parameter of shape {tuple(stray.shape)} that the model does not have: "
                "create it with the model's own parameters"
            )
        self._names = frozenset(names.values())
        self._group_of = {names[id(p)]: i for i, group in enumerate(self.param_groups) for p in group["params"]}

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

    @property
    def factory(self) -> OptimizerFactory:
        """Creates the optimizer of a stage, for ``panpipe.pipeline``: the same class, groups and options."""
        return self._stage_optimizer

    def _stage_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        taken = [(name, p) for name, p in named if name in self._group_of or name not in self._names]
        if not taken:
            return None
        groups = self._options()
        for group in groups:
            group["params"] = []
        for name, parameter in taken:  # a name that the model does not have is from a trial build with other tensors
            groups[self._group_of.get(name, 0)]["params"].append(parameter)
        accepted = inspect.signature(self._kind).parameters
        made = self._kind(groups, **{key: value for key, value in self.defaults.items() if key in accepted})
        for _, parameter in taken:
            if parameter in self.state:  # the state of a checkpoint
                made.state[parameter] = {key: _copied(value) for key, value in self.state[parameter].items()}
        return made

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group."""
        return [{key: value for key, value in group.items() if key not in MEMBERS} for group in self.param_groups]

    def copy_options(self, pipe: Pipeline) -> None:
        """Copy the options of the groups, such as learning rates, to the optimizers of the stages."""
        options = self._options()
        for optimizer in pipe.optimizers.values():
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
