"""An optimizer over the whole model, as users and frameworks create it, whose groups the stages' optimizers follow.

given optimizer ──▶ its class, groups, options and state ──▶ an optimizer for each stage
                ──▶ options, such as learning rates that its schedulers write ── before each step ──▶ the same
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...core.errors import RequestError
from .optimizers import MEMBERS

_READ = ("param_groups", "state", "defaults")
"""What an optimizer is created from."""


class GivenOptimizer:
    """Creates the stages' optimizers from an optimizer over a model: the same class, groups, options and state.

    Args:
        given: over parameters of the model.
        model: the model.

    Raises:
        RequestError: it takes a parameter that the model does not have, or has state of parameters that are DTensors;
            or its class, groups and options do not create an equal one.
    """

    def __init__(self, given: Optimizer, model: nn.Module) -> None:
        self._given, self._model, self._kind = given, model, type(given)
        self._name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [p for group in given.param_groups for p in group["params"]]
        stray = next((p for p in parameters if id(p) not in self._name_of), None)
        if stray is not None:
            raise RequestError(
                f"{self._kind.__name__} takes a parameter of shape {tuple(stray.shape)} that the model does not have: "
                "create it with the model's own parameters"
            )
        if given.state and any(isinstance(p, DTensor) for p in parameters):
            raise RequestError(
                f"{self._kind.__name__} has stepped, and its parameters are DTensors: give a new optimizer, and resume "
                "its state by pipe.resume(folder)"
            )
        self._names = frozenset(self._name_of.values())
        self._groups = len(given.param_groups)
        self._group_of = {
            self._name_of[id(p)]: i for i, group in enumerate(given.param_groups) for p in group["params"]
        }
        self._check()

    def _check(self) -> None:
        """Refuse an optimizer that its class, groups and options do not create again."""
        try:
            again = self._created([{**group, "params": [nn.Parameter(Tensor(1))]} for group in self._options()])
            held = {key: value for key, value in vars(self._given).items() if key not in _READ}
            other = [key for key, value in held.items() if _differs(again, key, value)]
        except Exception:
            other = ["its arguments"]
        if other:
            kind, values = self._kind.__name__, ", ".join(f"{k}={value!r}" for k, value in self._given.defaults.items())
            raise RequestError(
                f"optimizer is an object of {kind}, and {other[0]} cannot be read from its groups, as each stage's own "
                f"optimizer needs it: give a function, optimizer=lambda p: {kind}(p, {values})"
            )

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """The optimizer of a stage with these parameters; None if the given one takes none of them."""
        taken = [(name, p) for name, p in named if name in self._group_of or name not in self._names]
        if not taken:
            return None
        groups = self._options()
        for group in groups:
            group["params"] = []
        for name, parameter in taken:  # a name that the model does not have is from a trial build with other tensors
            groups[self._group_of.get(name, 0)]["params"].append(parameter)
        made = self._created(groups)
        states = {self._name_of.get(id(p)): state for p, state in self._given.state.items()}
        for name, parameter in taken:
            if name in states:
                made.state[parameter] = {k: _copied(value, parameter) for k, value in states[name].items()}
        return made

    def _created(self, groups: list[dict[str, Any]]) -> Optimizer:
        accepted = inspect.signature(self._kind).parameters
        return self._kind(groups, **{key: value for key, value in self._given.defaults.items() if key in accepted})

    def _options(self) -> list[dict[str, Any]]:
        """The options of each group."""
        groups = self._given.param_groups
        if len(groups) != self._groups:
            raise RequestError(
                f"{self._kind.__name__} has {len(groups)} groups, and {self._groups} when the pipeline was built: "
                "build another pipeline, or put all parameters into groups before, also those that are frozen"
            )
        return [{key: value for key, value in group.items() if key not in MEMBERS} for group in groups]

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self._given.param_groups if "lr" in group]

    def copy_options(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy the options of the groups, such as learning rates, to the optimizers of stages."""
        options = self._options()
        for optimizer in optimizers:
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values)
        self._given._opt_called = True  # type: ignore[attr-defined] # its schedulers read it

    def take_options(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the options of the groups from the optimizers of stages, which a checkpoint has set."""
        for optimizer in optimizers[:1]:
            for group, values in zip(self._given.param_groups, optimizer.param_groups, strict=True):
                group.update({key: value for key, value in values.items() if key not in MEMBERS})

    def follow_model(self) -> None:
        """Refer to the parameters that the model has now, and hold no state: the stages have it.

        Parameters of other processes are freed.
        """
        own = dict(self._model.named_parameters())
        groups: list[list[nn.Parameter]] = [[] for _ in self._given.param_groups]
        for name, index in self._group_of.items():
            groups[index].append(own[name])
        for group, parameters in zip(self._given.param_groups, groups, strict=True):
            group["params"] = parameters
        self._given.state.clear()

    def refuse_other_use(self) -> None:
        """From now on refuse to step the given optimizer, to save its state and to load it: the stages have it."""
        self._given.register_step_pre_hook(_refuse_step)
        self._given.register_state_dict_pre_hook(_refuse_state)
        self._given.register_load_state_dict_pre_hook(_refuse_state)


def _copied(value: Any, parameter: nn.Parameter) -> Any:
    """A part of a parameter's state; counters stay on their device."""
    if not isinstance(value, Tensor):
        return value
    return value.to(parameter.device, copy=True) if value.shape == parameter.shape else value.clone()


def _differs(again: Optimizer, key: str, value: Any) -> bool:
    """Whether an attribute is a plain value or a collection, and another one or missing in an equal optimizer."""
    if key.startswith(("_optimizer_", "_zero_grad", "_opt_", "_patched")) or not isinstance(
        value, int | float | str | tuple | list | dict | set | None
    ):
        return False
    return not hasattr(again, key) or getattr(again, key) != value


def _refuse_state(optimizer: Optimizer, *_: Any) -> None:
    raise RequestError(
        f"{type(optimizer).__name__} has no state, which the pipeline's stages have: write and read it by "
        "pipe.checkpoint(folder) and pipe.resume(folder), or pipe.state_dict()"
    )


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    raise RequestError(
        f"{type(optimizer).__name__}.step() would update a second time: pipe.step(batch) has updated already; leave "
        "optimizer.step() out"
    )
