"""Saving a pipeline's weights: every process writes its part of the model, and each tensor is written once."""

import json
from pathlib import Path

from torch import Tensor, nn

from ...core.errors import RequestError
from ..launch.team import Team
from .checkpoint import INDEX, SINGLE, write_tensors, write_whole
from .places import places, tensor_at


def save_checkpoint(folder: Path, model: nn.Module, team: Team, frozen: bool = True) -> None:
    """Write the weights of all processes as one checkpoint.

    1. The processes exchange the names of their tensors; the first that has a tensor writes it.
    2. Each writes its file under a temporary name and renames it.
    3. After that, the first process writes the index.

    Args:
        frozen: whether tensors without ``requires_grad`` are written.

    Raises:
        RequestError: something cannot be written; on every rank.
    """
    here = {name: tensor for name, tensor in savable(model).items() if frozen or tensor.requires_grad}
    splits = {name: team.tensors.split_of(name, tuple(tensor.shape)) for name, tensor in sorted(here.items())}
    whole = {name: team.tensors.gather(here[name], split) for name, split in splits.items() if split is not None}
    here = {name: whole.get(name, tensor) for name, tensor in here.items()}
    exchange, writers = team.exchange(), team.size // len(team.local)
    earlier = {name for names in exchange.gather(list(here))[: exchange.number] for name in names}
    mine = {name: tensor for name, tensor in here.items() if name not in earlier}
    failure: RequestError | None = None
    part: tuple[str, int, list[str]] | None = None  # name of a file, bytes of its tensors, and their names
    if exchange.number < writers:
        file = f"model-{exchange.number + 1:05d}-of-{writers:05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SINGLE).exists():
                raise RequestError(
                    f"'{folder}' has a {SINGLE}, which readers would read instead of the new files: give another folder"
                )
            part = file, write_tensors(folder / file, mine), list(mine)
        except OSError as error:
            failure = RequestError(f"cannot create folder '{folder}': {error.strerror}; give another")
        except RequestError as error:
            failure = error
    team.agree(failure)
    parts = [found for found in exchange.gather(part) if found is not None]
    where = {name: file for file, _, names in parts for name in names}
    index = {"metadata": {"total_size": sum(size for _, size, _ in parts)}, "weight_map": dict(sorted(where.items()))}
    team.decide(lambda: write_whole(folder / INDEX, [json.dumps(index, indent=2).encode()]))


def savable(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers with data in this process, each under its first persistent name."""
    found = {}
    for held in places(model).values():
        saved = [place for place in held if place.persistent]
        if saved and not tensor_at(held[0]).is_meta:
            found[saved[0].name] = tensor_at(held[0])
    return found
