"""Saving a pipeline: every process writes what it holds of the model, and none what another one writes."""

from pathlib import Path

from torch import Tensor, nn

from ...core.errors import RequestError
from ..launch.team import Team
from ..weights import places, tensor_at
from ..weights.checkpoint import write_index, write_part

Part = tuple[str, int, list[str]]
"""Name of a file, bytes of its tensors, and their names."""


def save_checkpoint(folder: Path, model: nn.Module, team: Team) -> None:
    """Write a checkpoint of what all processes hold.

    1. All of the first replica tell what they have; the first process that has a tensor writes it.
    2. Each writes its file under a temporary name and renames it.
    3. When all have, the first process writes the index.

    Args:
        folder: that all of them see.
        model: the user's module; what other processes hold is on meta.
        team: the devices.

    Raises:
        RequestError: something cannot be written; on every rank.
    """
    here, process = savable(model), team.replica * team.size + team.local[0]
    told = team.everywhere(lambda _: (process, list(here)))
    claims = dict(told[: team.size])
    writer = {name: number for number in sorted(claims, reverse=True) for name in claims[number]}
    mine = {name: tensor for name, tensor in here.items() if writer.get(name) == process}

    failure: RequestError | None = None

    def write(device: int) -> Part | None:
        nonlocal failure
        if team.replica > 0 or device != process:  # another thread of this process
            return None
        try:
            return *write_part(folder, sorted(claims).index(process), len(claims), mine), list(mine)
        except RequestError as error:
            failure = error
            return None

    written = team.everywhere(write)
    team.agree(failure)
    parts = [found for found in written if found is not None]
    where = {name: file for file, _, names in parts for name in names}
    team.decide(lambda: write_index(folder, where, sum(size for _, size, _ in parts)))


def savable(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers that have data here, each under its first name that is saved."""
    found = {}
    for held in places(model).values():
        saved = [place for place in held if place.persistent]
        if saved and not tensor_at(held[0]).is_meta:
            found[saved[0].name] = tensor_at(held[0])
    return found
