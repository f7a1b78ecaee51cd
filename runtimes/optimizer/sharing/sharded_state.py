"""A stage's optimizer state by parameter name when each replica has a part: read and written as without sharding.

Reading gathers the whole tensors on the CPU, so that a checkpoint does not depend on how it was sharded. All replicas
read together. Loading takes this replica's slices of whole tensors, and needs no other replica.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optimizer_state import NamedState, leaves_of, zeros_of
from ..optimizers import MEMBERS, OptimizerFactory
from ..replica_values import gather_values
from .sharded_buckets import Part, ShardedBucket, in_memory_order
from .shards import Shards, narrowed


class ShardedNamedState(NamedState):
    """The state of one stage's optimizer by name; the optimizer steps slices.

    Args:
        optimizer: the stage's.
        make: created it.
        parameters: the stage's trained parameters by name; whole.
        shards: this replica's slices.
    """

    def __init__(
        self, optimizer: Optimizer, make: OptimizerFactory, parameters: Mapping[str, nn.Parameter], shards: Shards
    ) -> None:
        super().__init__(optimizer, make, parameters, shards.members)
        self._shards = shards

    @property
    def stepped(self) -> dict[str, bool]:
        """For each parameter whether the optimizer has state of it. All replicas call this together."""
        found = self._of_first_owners()
        return {name: found.get(name, {}).get("stepped", False) for name in self.names}

    @property
    def kept(self) -> dict[str, set[str]]:
        """Parameter → the keys of its state, also if it was not stepped yet."""
        return {name: set(leaves_of(self._own(name) or self._blank(name))) for name in self.names}

    def read(self) -> dict[str, Any]:
        """The state by its flattened names, whole, on the CPU. All replicas call this together."""
        found: dict[str, Any] = {}
        first = self._of_first_owners()
        whole = self._gathered(first)
        for name in self.names:
            if first.get(name, {}).get("stepped", False):
                own = {**first[name]["values"], **whole[name]}
                found |= {f"state.{name}.{path}": own[path] for path in first[name]["paths"]}
            else:
                found |= leaves_of(zeros_of(self._blank(name), torch.device("cpu")), f"state.{name}.")
        for names, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            for name in names:
                found |= {f"param_groups.{name}.{k}": v for k, v in group.items() if k not in MEMBERS}
        return found

    def packed(self, found: Mapping[str, Any], stepped: Mapping[str, bool]) -> dict[str, Any]:
        """A state for this replica's ``load_state_dict``, with slices of the tensors found.

        Raises:
            RequestError: parameters of one group had different options.
        """
        own = self._optimizer.state_dict()
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        parts = {part.value: part for part in self._shards.parts.values()}
        state = {}
        for index, value in enumerate(held):
            part = parts[value]
            if stepped.get(part.name):
                template = self._own(part.name) or self._blank(part.name)
                state[index] = narrowed(self._like(template, found, f"state.{part.name}"), part)
        groups = [
            options | self._options(names, options, found)
            for names, options in zip(self._groups, own["param_groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _own(self, name: str) -> dict[str, Any]:
        """This replica's state of a parameter; empty if there is none."""
        part = self._shards.parts.get(name)
        return {} if part is None else dict(self._optimizer.state.get(part.value, {}))

    def _of_first_owners(self) -> dict[str, dict[str, Any]]:
        """By parameter, from the replica that has its first element: what is not in slices, and where slices are."""
        mine: dict[str, dict[str, Any]] = {}
        for name, part in self._shards.parts.items():
            if part.start == 0:
                leaves = leaves_of(self._own(name))
                mine[name] = {
                    "stepped": bool(leaves),
                    "paths": list(leaves),
                    "values": {path: _on_cpu(v) for path, v in leaves.items() if not self._is_slice(path, v, part)},
                    "slices": {path: v.dtype for path, v in leaves.items() if self._is_slice(path, v, part)},
                }
        sharing = self._shards.sharing
        device = next((bucket.device for bucket in self._shards.buckets), torch.device("cpu"))
        of_all = gather_values(mine, sharing.replicas(), device)
        return {name: one for of_one in of_all for name, one in of_one.items()}

    def _is_slice(self, path: str, value: Any, part: Part) -> bool:
        """Whether a value is a slice of a tensor of the parameter's shape."""
        if not isinstance(value, Tensor) or part.whole.ndim == 0 or value.shape != part.value.shape:
            return False
        if part.value.numel() > 1 or part.whole.numel() == 1:
            return True
        blank = leaves_of(self._blank(part.name)).get(path)  # a counter may have one element, too
        return not isinstance(blank, Tensor) or blank.shape == part.whole.shape

    def _gathered(self, first: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
        """The whole tensors of which replicas have slices, by parameter and path."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for bucket in self._shards.buckets:
            slices = {
                (path, dtype)
                for name in bucket.parameters
                if name in found
                for path, dtype in first.get(name, {}).get("slices", {}).items()
            }
            for path, dtype in sorted(slices, key=str):
                memory = self._gather(bucket, path, dtype)
                for name, parameter in bucket.parameters.items():
                    if name in found and first.get(name, {}).get("slices", {}).get(path) == dtype:
                        found[name][path] = _whole(memory, bucket.offsets[name], parameter)
        return found

    def _gather(self, bucket: ShardedBucket, path: str, dtype: torch.dtype) -> Tensor:
        memory = torch.zeros(bucket.elements, dtype=dtype, device=bucket.device)
        for part in bucket.parts:
            value = leaves_of(self._own(part.name)).get(path)
            if isinstance(value, Tensor) and value.dtype == dtype and value.shape == part.value.shape:
                begin = bucket.offsets[part.name] + part.start
                memory[begin : begin + part.value.numel()] = value.flatten()
        self._shards.sharing.replicas().all_gather(torch.view_as_real(memory) if memory.is_complex() else memory).wait()
        return memory


def _whole(memory: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """A parameter's tensor from a bucket, contiguous, on the CPU."""
    tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=memory.dtype)
    in_memory_order(tensor).copy_(memory[offset : offset + parameter.numel()])
    return tensor.contiguous()


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
