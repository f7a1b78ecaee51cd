"""Moves the state of training between the ranks of a pipeline, in memory, for another plan.

    every rank lists what it holds ──▶ every rank knows who needs what ──▶ messages from each rank to each other one

State that a rank needs comes from the first rank that holds it. Nothing is copied that a rank holds already. Replicas
move the same, each within itself; what they share is whole then, optimizer state on the host.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ..checkpoint.state_parts import Parts
from ..launch.team import Team
from ..training.averages import held_here
from ..weights.sources import Weights

TENSOR, OPTIMIZER, STEPPED, AVERAGE = "tensor", "optimizer", "stepped", "ema"
"""First part of the key of an entry: parameters and buffers, optimizer state, whether it stepped, averages."""
Key = tuple[str, str]
"""(kind, name): the name of a parameter or buffer, or of an entry of its optimizer state."""
_VALUE = "value"
PORTION_BYTES = 64 << 20
"""Most bytes of a message of several tensors: of state that is kept on the host, a device then holds only a few."""


@frozen
class MovableState:
    """The state of training of this process, by names that do not depend on the plan.

    Args:
        tensors: of all entries that are tensors.
    """

    tensors: dict[Key, Tensor]
    values: dict[Key, Any]

    @classmethod
    def of(cls, model: nn.Module, state: Parts, averages: Sequence[Mapping[str, Tensor]]) -> "MovableState":
        """What this process holds.

        Args:
            model: the user's module; tensors of other processes are on meta.
            averages: of the weights, by name.
        """
        entries: dict[Key, Any] = {
            (TENSOR, name): tensor.detach() for name, tensor in held_here(model, buffers=True).items()
        }
        entries |= {(OPTIMIZER, name): value for name, value in state.section("optimizer").items()}
        entries |= {(STEPPED, name): value for name, value in state.section("stepped").items()}
        for number, average in enumerate(averages):
            entries |= {(f"{AVERAGE} {number}", name): tensor for name, tensor in average.items()}
        tensors = {key: value.detach() for key, value in entries.items() if isinstance(value, Tensor)}
        return cls(tensors, {key: value for key, value in entries.items() if key not in tensors})

    def moved(self, team: Team, needed: Sequence[Set[str]], written: Set[str]) -> "MovableState":
        """The state with what this process needs for a plan. All ranks call this together.

        Args:
            needed: for each device the names of the tensors that its stages of the new plan hold.
            written: the buffers that the step writes; the others have values on every rank.
        """
        if len(team.local) == team.size:
            return self
        listings = team.in_replica(lambda _: self._listing())
        held = [{(kind, name): what for kind, name, what in listing} for listing in listings]
        messages: dict[tuple[int, int], list[Key]] = {}
        values = dict(self.values)
        for reader in range(team.size):
            for key, owner in _needed(held, needed[reader], written):
                if key in held[reader]:
                    continue
                what = held[owner][key]
                if what[0] != _VALUE:
                    messages.setdefault((owner, reader), []).append(key)
                elif reader in team.local:
                    values[key] = what[1]
        return MovableState(self.tensors | self._exchange(team, messages, held), values)

    def _listing(self) -> list[tuple[str, str, tuple[Any, ...]]]:
        tensors = [(*key, (tuple(t.shape), str(t.dtype), t.device.type)) for key, t in self.tensors.items()]
        return [*tensors, *((*key, (_VALUE, value)) for key, value in self.values.items())]

    def _exchange(
        self, team: Team, messages: Mapping[tuple[int, int], list[Key]], held: Sequence[Mapping[Key, Any]]
    ) -> dict[Key, Tensor]:
        """Send and receive; (owner, reader) → the keys of their messages, in the same order on all ranks."""
        found: dict[Key, Tensor] = {}
        team.connect(sorted(messages))

        portions = {pair: _portions(keys, held[pair[0]]) for pair, keys in sorted(messages.items())}

        def exchange(device: int, now: Mapping[tuple[int, int], list[Key]]) -> None:
            backend, where, handles = team.backend(device), team.where[device], []
            received: dict[Key, tuple[Tensor, str]] = {}
            for (owner, reader), keys in now.items():
                if device == owner:
                    handles.append(backend.send([self.tensors[key].contiguous().to(where) for key in keys], reader))
                elif device == reader:
                    own = {key: _empty(held[owner][key], where) for key in keys}
                    received |= {key: (tensor, held[owner][key][2]) for key, tensor in own.items()}
                    handles.append(backend.receive(list(own.values()), owner))
            for handle in handles:
                handle.wait()
            # What the owner has on the host, such as the count of steps of an optimizer, is kept there.
            found.update({key: t.cpu() if kind == "cpu" else t for key, (t, kind) in received.items()})

        def work(device: int) -> None:
            for number in range(max(map(len, portions.values()), default=0)):
                exchange(device, {pair: own[number] for pair, own in portions.items() if number < len(own)})

        team.run_local(work)
        return found

    def part(self, kind: str) -> dict[str, Any]:
        """The entries of one kind, by name."""
        return {name: value for (k, name), value in (*self.tensors.items(), *self.values.items()) if k == kind}


def _needed(held: Sequence[Mapping[Key, Any]], parameters: Set[str], written: Set[str]) -> list[tuple[Key, int]]:
    """The entries of some parameters and buffers, each with the first device that holds it."""
    owners: dict[Key, int] = {}
    for device, entries in enumerate(held):
        for key in entries:
            owners.setdefault(key, device)
    starts = tuple(f"{section}.{name}." for name in parameters for section in ("state", "param_groups"))
    needed = []
    for key, owner in sorted(owners.items()):
        kind, name = key
        if (
            name in parameters
            or (kind != OPTIMIZER and name in written)
            or (kind == OPTIMIZER and name.startswith(starts))
        ):
            needed.append((key, owner))
    return needed


def _portions(keys: Sequence[Key], held: Mapping[Key, Any]) -> list[list[Key]]:
    """The keys of the messages from one rank to another, each of at most ``PORTION_BYTES`` or of one tensor."""
    found: list[list[Key]] = []
    left = 0
    for key in keys:
        shape, dtype, _ = held[key]
        size = math.prod(shape) * _dtype(dtype).itemsize
        if not found or size > left:
            found.append([])
            left = PORTION_BYTES
        found[-1].append(key)
        left -= size
    return found


def _empty(what: tuple[Any, ...], where: torch.device) -> Tensor:
    shape, dtype, _ = what
    return torch.empty(shape, dtype=_dtype(dtype), device=where)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


class MovedWeights(Weights):
    """Values of parameters and buffers that other processes held."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def check(self, read: Any) -> None:
        """They were listed before they were moved."""

    def fill(self, held: Mapping[str, Tensor], unset: Any) -> None:
        """Copy the values of the tensors that have none yet."""
        with torch.no_grad():
            for name in unset:
                held[name].copy_(self._tensors[name])
