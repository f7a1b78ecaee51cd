"""An optimizer's state by the names of parameters, as ``torch.distributed.checkpoint.state_dict`` flattens it.

    state.blocks.0.up.weight.exp_avg          the optimizer's state of a parameter
    param_groups.blocks.0.up.weight.lr        an option of the parameter's group

A checkpoint has no index of a group or of a parameter, because these depend on the stage: another plan, whose stages
have other parameters, reads the same names. A parameter that was never stepped has no state. Its keys are written
anyway, with zeros, because a reader must know the keys in advance; `NamedState.stepped` marks these parameters.

If each replica has a part of the state, reading gathers the whole tensors on the CPU, so that a checkpoint does not
depend on how it was sharded: all replicas read together. Loading takes this replica's slices of whole tensors.
"""

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ...core.errors import RequestError
from .buckets import Bucket, Part, in_memory_order, numbers_of
from .optimizers import MEMBERS, OptimizerFactory, blank_state
from .replica_values import gather_values
from .shards import Shards, narrowed

State = dict[str, Any]
"""What an optimizer keeps for a parameter, or values by flattened names."""


class NamedState:
    """The state of one stage's optimizer by name.

    Args:
        make: created the optimizer; used to find the state of a parameter that it has not stepped yet.
        shards: this replica's slices, which the optimizer steps; None if it steps whole parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: OptimizerFactory,
        parameters: Mapping[str, nn.Parameter],
        shards: Shards | None = None,
    ) -> None:
        self._optimizer, self._make, self._parameters, self._shards = optimizer, make, parameters, shards
        self._blanks: dict[str, State] = {}
        self._lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        names = {id(parameter): name for name, parameter in parameters.items()}
        if shards is not None:
            names = {id(part.value): name for name, part in shards.parts.items()}
        held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._held = [name for group in held for name in group]
        self._groups = held if shards is None else shards.members

    @property
    def names(self) -> list[str]:
        """Names of the parameters that the optimizer steps, in its order; of all replicas."""
        return [name for group in self._groups for name in group]

    @property
    def stepped(self) -> dict[str, bool]:
        """For each parameter whether the optimizer has state of it. All replicas that share it call this together."""
        states = self._own() if self._shards is None else self._of_first_owners(self._shards)
        return {name: bool(states.get(name)) for name in self.names}

    def read(self) -> State:
        """The state by its flattened names. All replicas that share the optimizer call this together, and get whole
        tensors on the CPU; otherwise tensors are the optimizer's own, where it has any."""
        found: State = {}
        states = self._own() if self._shards is None else self._gathered(self._shards)
        for name in self.names:
            device = self._parameters[name].device if self._shards is None else torch.device("cpu")
            found |= leaves_of(states.get(name) or zeros_of(self._blank(name), device), f"state.{name}.")
        for names, options in zip(self._groups, self._optimizer.state_dict()["param_groups"], strict=True):
            for name in names:
                found |= {f"param_groups.{name}.{k}": v for k, v in options.items() if k not in MEMBERS}
        if self._shards is None:
            self._lent.update({id(value): value for value in found.values() if isinstance(value, Tensor)})
        return found

    def packed(self, found: Mapping[str, Any], stepped: Mapping[str, bool]) -> State:
        """A state for the optimizer's ``load_state_dict``.

        Args:
            found: with all the names of `read`. Tensors that `read` returned are used as they are, others are copied.

        Raises:
            RequestError: parameters of one group had different options.
        """
        own, state = self._own(), dict[int, Any]()
        for index, name in enumerate(self._held):
            if stepped.get(name):
                whole = self._like(own.get(name) or self._blank(name), found, f"state.{name}")
                state[index] = whole if self._shards is None else narrowed(whole, self._shards.parts[name])
        groups = [
            options | self._options(names, options, found)
            for names, options in zip(self._groups, self._optimizer.state_dict()["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _own(self) -> dict[str, State]:
        """The state of each parameter that the optimizer steps here; empty for one that was never stepped."""
        state = self._optimizer.state_dict()["state"]
        stray = next((key for key in state if not isinstance(key, int)), None)
        if stray is not None:
            raise RequestError(
                f"{type(self._optimizer).__name__} keeps '{stray}', which belongs to no parameter: a checkpoint is by "
                "parameters, so that other stages can read it; use an optimizer that keeps state only for parameters"
            )
        return {name: state.get(i, {}) for i, name in enumerate(self._held)}

    def _blank(self, name: str) -> State:
        """The state that the optimizer will have of a parameter: tensors on meta, but for scalars such as counters."""
        if name not in self._blanks:
            state = blank_state(self._make, name, self._parameters[name])
            self._blanks[name] = tree_map_only(Tensor, lambda t: t.to("meta") if t.ndim else t, state)
        return self._blanks[name]

    def _options(self, names: list[str], options: Mapping[str, Any], found: Mapping[str, Any]) -> State:
        """A group's options; an empty group keeps its own."""
        taken: State = {}
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

    def _of_first_owners(self, shards: Shards) -> dict[str, State]:
        """The state of each parameter by path, from the replica that has its first element; of slices the dtype."""
        mine, own = dict[str, State](), self._own()
        for name, part in shards.parts.items():
            if part.start == 0:
                mine[name] = leaves_of(own.get(name, {}))
                for path, value in mine[name].items():
                    if isinstance(value, Tensor):
                        mine[name][path] = value.dtype if self._is_slice(path, value, part) else value.detach().cpu()
        of_all = gather_values(mine, shards.sharing.replicas(), shards.device)
        return {name: one for of_one in of_all for name, one in of_one.items()}

    def _is_slice(self, path: str, value: Tensor, part: Part) -> bool:
        """Whether a value is a slice of a tensor of the parameter's shape."""
        if part.whole.ndim == 0 or value.shape != part.value.shape:
            return False
        if part.value.numel() > 1 or part.whole.numel() == 1:
            return True
        blank = leaves_of(self._blank(part.name)).get(path)  # a counter may have one element, too
        return not isinstance(blank, Tensor) or blank.shape == part.whole.shape

    def _gathered(self, shards: Shards) -> dict[str, State]:
        """The state of each parameter by path, with whole tensors."""
        of_each, own = self._of_first_owners(shards), self._own()
        for bucket in shards.buckets:
            states = {name: of_each.get(name, {}) for name in bucket.parameters}
            slices = {pair for held in states.values() for pair in held.items() if isinstance(pair[1], torch.dtype)}
            for path, dtype in sorted(slices, key=str):
                memory = _all_of(bucket, path, dtype, own, shards)
                for name, held in states.items():
                    if isinstance(held.get(path), torch.dtype) and held[path] == dtype:
                        held[path] = _whole(memory, bucket, bucket.parameters[name])
        return of_each


def _all_of(bucket: Bucket, path: str, dtype: torch.dtype, own: Mapping[str, State], shards: Shards) -> Tensor:
    """A tensor of the optimizer's state of each parameter in a bucket, gathered from all replicas."""
    memory = torch.zeros(bucket.elements, dtype=dtype, device=bucket.device)
    for part in bucket.parts:
        value = leaves_of(own.get(part.name, {})).get(path)
        if isinstance(value, Tensor) and value.dtype == dtype and value.shape == part.value.shape:
            part.slice_of(bucket.elements_of(part.whole, memory)).copy_(value.flatten())
    shards.sharing.replicas().all_gather(numbers_of(memory)).wait()
    return memory


def _whole(memory: Tensor, bucket: Bucket, parameter: nn.Parameter) -> Tensor:
    """A parameter's tensor from the memory of a bucket, contiguous, on the CPU."""
    tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=memory.dtype)
    in_memory_order(tensor).copy_(bucket.elements_of(parameter, memory))
    return tensor.contiguous()


def leaves_of(state: Mapping[Any, Any], prefix: str = "") -> State:
    """The leaves of a nested state, by path."""
    found: State = {}
    for key, value in state.items():
        found |= leaves_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def zeros_of(state: State, device: torch.device) -> State:
    """A state with zeros in its tensors; those on meta are on a device then."""
    found: State = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device=device if t.is_meta else t.device), state)
    return found
