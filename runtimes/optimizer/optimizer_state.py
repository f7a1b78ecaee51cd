"""An optimizer's state by the names of parameters, as ``torch.distributed.checkpoint.state_dict`` flattens it.

    state.blocks.0.up.weight.exp_avg          the optimizer's state of a parameter
    param_groups.blocks.0.up.weight.lr        an option of the parameter's group

A checkpoint has no index of a group or of a parameter, because these depend on the stage: another plan, whose stages
have other parameters, reads the same names. A parameter that was never stepped has no state. Its keys are written
anyway, with zeros, because a reader must know the keys in advance; `NamedState.stepped` marks these parameters.
"""

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import RequestError
from .optimizers import MEMBERS, OptimizerFactory, blank_state


class NamedState:
    """The state of one stage's optimizer by name.

    Args:
        optimizer: the stage's.
        make: created it; used to find the state of a parameter that it has not stepped yet.
        parameters: the stage's trained parameters by name.
        groups: names of the parameters of each group; by default as the optimizer has them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: OptimizerFactory,
        parameters: Mapping[str, nn.Parameter],
        groups: list[list[str]] | None = None,
    ) -> None:
        self._optimizer, self._make = optimizer, make
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = groups or [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._parameters = parameters
        self._blanks: dict[str, dict[str, Any]] = {}
        self._lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def names(self) -> list[str]:
        """Names of the parameters that the optimizer steps, in its order."""
        return [name for group in self._groups for name in group]

    @property
    def stepped(self) -> dict[str, bool]:
        """For each parameter whether the optimizer has state of it."""
        return {name: bool(self._optimizer.state.get(self._parameters[name])) for name in self.names}

    @property
    def kept(self) -> dict[str, set[str]]:
        """Parameter → the keys of its state, also if it was not stepped yet."""
        state = self._packed()["state"]
        return {name: set(leaves_of(own or self._blank(name))) for name, own in state.items()}

    def read(self) -> dict[str, Any]:
        """The state by its flattened names. Tensors are the optimizer's own, where it has any."""
        found: dict[str, Any] = {}
        packed = self._packed()
        for name, state in packed["state"].items():
            found |= leaves_of(state or zeros_of(self._blank(name), self._parameters[name].device), f"state.{name}.")
        for names, options in zip(self._groups, packed["param_groups"], strict=True):
            for name in names:
                found |= {f"param_groups.{name}.{k}": v for k, v in options.items() if k not in MEMBERS}
        self._lent.update({id(value): value for value in found.values() if isinstance(value, Tensor)})
        return found

    def packed(self, found: Mapping[str, Any], stepped: Mapping[str, bool]) -> dict[str, Any]:
        """A state for the optimizer's ``load_state_dict``.

        Args:
            found: with all the names of `read`. Tensors that `read` returned are used as they are, others are copied.
            stepped: by name whether the parameter has a state.

        Raises:
            RequestError: parameters of one group had different options.
        """
        packed, state = self._packed(), dict[int, Any]()
        for index, (name, own) in enumerate(packed["state"].items()):
            if stepped.get(name):
                state[index] = self._like(own or self._blank(name), found, f"state.{name}")
        groups = [
            options | self._options(names, options, found)
            for names, options in zip(self._groups, packed["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _packed(self) -> dict[str, Any]:
        """The optimizer's own state dict, with parameters' names in place of their indices."""
        packed, names = self._optimizer.state_dict(), self.names
        stray = next((key for key in packed["state"] if not isinstance(key, int)), None)
        if stray is not None:
            raise RequestError(
                f"{type(self._optimizer).__name__} keeps '{stray}', which belongs to no parameter: a checkpoint is by "
                "parameters, so that other stages can read it; use an optimizer that keeps state only for parameters"
            )
        return {**packed, "state": {name: packed["state"].get(i, {}) for i, name in enumerate(names)}}

    def _blank(self, name: str) -> dict[str, Any]:
        """The state that the optimizer will have of a parameter: tensors on meta."""
        if name not in self._blanks:
            state = blank_state(self._make, name, self._parameters[name])
            self._blanks[name] = {key: _on_meta(value) for key, value in state.items()}
        return self._blanks[name]

    def _options(self, names: list[str], options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options; an empty group keeps its own."""
        taken: dict[str, Any] = {}
        for key in options if names else ():
            of_each = [found.get(f"param_groups.{name}.{key}", options[key]) for name in names]
            other = next((i for i, value in enumerate(of_each) if repr(value) != repr(of_each[0])), None)
            if other is not None:
                raise RequestError(
                    f"'{names[0]}' has {key} {of_each[0]} in the checkpoint and '{names[other]}' has {of_each[other]}, "
                    "and both are in one parameter group here: form the groups that the checkpoint was written with"
                )
            if key not in MEMBERS:
                taken[key] = of_each[0]
        return taken

    def _like(self, template: Any, found: Mapping[str, Any], path: str) -> Any:
        if isinstance(template, dict):
            return {key: self._like(value, found, f"{path}.{key}") for key, value in template.items()}
        value = found[path]
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return value if self._lent.get(id(value)) is value else value.detach().clone()


def leaves_of(state: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested state, by path."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= leaves_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _on_meta(value: Any) -> Any:
    """A state on meta; scalar tensors, such as step counters, are unchanged."""
    if isinstance(value, dict):
        return {key: _on_meta(below) for key, below in value.items()}
    return value.to("meta") if isinstance(value, Tensor) and value.ndim > 0 else value


def zeros_of(value: Any, device: torch.device) -> Any:
    """The state with zeros in place of tensors on meta."""
    if isinstance(value, dict):
        return {key: zeros_of(below, device) for key, below in value.items()}
    if isinstance(value, Tensor):
        return torch.zeros_like(value, device=device if value.is_meta else value.device)
    return value
