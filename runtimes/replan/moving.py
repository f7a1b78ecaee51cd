"""Moves the state of training between the ranks of a pipeline, in memory, for another plan.

    every rank lists what it holds ──▶ every rank knows who needs what ──▶ messages from each rank to each other one

State that a rank needs comes from the first rank that holds it. Nothing is copied that a rank holds already. Replicas
move the same, each within itself; what they share is whole then, optimizer state on the host.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reading import Parts
from ..launch.team import Team
from ..training.ownership import held_here
from ..weights.sources import Weights

HELD = "held"
"""The section of parameters and buffers, also those that no checkpoint has."""
_VALUE = "value"
PORTION_BYTES = 64 << 20
"""Most bytes of a message of several tensors: of state that is kept on the host, a device then holds only a few."""


def movable(model: nn.Module, state: Parts) -> Parts:
    """What this process holds: the model's tensors, the optimizer's state, and averages of the weights.

    Args:
        model: the user's module; tensors of other processes are on meta.
        state: of a checkpoint, with whole parameters.
    """
    found = {f"{HELD}.{name}": tensor for name, tensor in held_here(model, buffers=True).items()}
    for name, value in {**state.tensors, **state.items}.items():
        if name.startswith(("optimizer.", "stepped.")) or (name.startswith("ema.") and isinstance(value, Tensor)):
            found[name] = value
    tensors = {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}
    return Parts(tensors, {name: value for name, value in found.items() if name not in tensors})


def moved_state(own: Parts, team: Team, needed: Sequence[Set[str]], written: Set[str]) -> Parts:
    """The state with what this process needs for a plan. All ranks call this together.

    Args:
        own: of `movable`.
        needed: for each device the names of the tensors that its stages of the new plan hold.
        written: the buffers that the step writes; the others have values on every rank.
    """
    if len(team.local) == team.size:
        return own
    held = [dict(listing) for listing in team.in_replica(lambda _: _listing(own))]
    messages: dict[tuple[int, int], list[str]] = {}
    values = dict(own.items)
    for reader in range(team.size):
        for key, owner in _needed(held, needed[reader], written):
            if key in held[reader]:
                continue
            what = held[owner][key]
            if what[0] != _VALUE:
                messages.setdefault((owner, reader), []).append(key)
            elif reader in team.local:
                values[key] = what[1]
    return Parts(own.tensors | _exchanged(own.tensors, team, messages, held), values)


def _listing(own: Parts) -> list[tuple[str, tuple[Any, ...]]]:
    tensors = [(name, (tuple(t.shape), str(t.dtype), t.device.type)) for name, t in own.tensors.items()]
    return [*tensors, *((name, (_VALUE, value)) for name, value in own.items.items())]


def _exchanged(
    own: Mapping[str, Tensor],
    team: Team,
    messages: Mapping[tuple[int, int], list[str]],
    held: Sequence[Mapping[str, Any]],
) -> dict[str, Tensor]:
    """Send and receive; (owner, reader) → the names of their tensors, in the same order on all ranks."""
    found: dict[str, Tensor] = {}
    team.connect(sorted(messages))
    portions = {pair: _portions(keys, held[pair[0]]) for pair, keys in sorted(messages.items())}

    def exchange(device: int, now: Mapping[tuple[int, int], list[str]]) -> None:
        backend, where, handles = team.backend(device), team.where[device], []
        received: dict[str, tuple[Tensor, str]] = {}
        for (owner, reader), keys in now.items():
            if device == owner:
                handles.append(backend.send([own[key].contiguous().to(where) for key in keys], reader))
            elif device == reader:
                new = {key: _empty(held[owner][key], where) for key in keys}
                received |= {key: (tensor, held[owner][key][2]) for key, tensor in new.items()}
                handles.append(backend.receive(list(new.values()), owner))
        for handle in handles:
            handle.wait()
        # What the owner has on the host, such as the count of steps of an optimizer, is kept there.
        found.update({key: t.cpu() if kind == "cpu" else t for key, (t, kind) in received.items()})

    def work(device: int) -> None:
        for number in range(max(map(len, portions.values()), default=0)):
            exchange(device, {pair: parts[number] for pair, parts in portions.items() if number < len(parts)})

    team.run_local(work)
    return found


def _needed(held: Sequence[Iterable[str]], parameters: Set[str], written: Set[str]) -> list[tuple[str, int]]:
    """The entries of some parameters and buffers, each with the first device that holds it."""
    owners: dict[str, int] = {}
    for device, entries in enumerate(held):
        for key in entries:
            owners.setdefault(key, device)
    starts = tuple(f"optimizer.{part}.{name}." for name in parameters for part in ("state", "param_groups"))

    def is_needed(key: str) -> bool:
        section, _, name = key.partition(".")
        if section == "optimizer":
            return key.startswith(starts)
        name = name.split(".", 2)[-1] if section == "ema" else name
        return name in parameters or name in written

    return [(key, owner) for key, owner in sorted(owners.items()) if is_needed(key)]


def _portions(keys: Sequence[str], held: Mapping[str, Any]) -> list[list[str]]:
    """The names of the messages from one rank to another, each of at most ``PORTION_BYTES`` or of one tensor."""
    found: list[list[str]] = []
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
