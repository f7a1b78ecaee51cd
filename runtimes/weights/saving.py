"""Saving a pipeline's weights: every process writes its part of the model, and each tensor is written once."""

import json
from pathlib import Path

from torch import Tensor, nn

from ...core.errors import RequestError
from ..launch.team import Team
from .checkpoint import INDEX, SINGLE, write_tensors, write_whole
from .places import places, tensor_at

Part = tuple[str, int, list[str]]
"""Name of a file, bytes of its tensors, and their names."""


def save_checkpoint(folder: Path, model: nn.Module, team: Team, frozen: bool = True) -> None:
    """Write the weights of all processes as one checkpoint.

    1. The processes of the first replica exchange the names of their tensors; the first that has a tensor writes it.
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
    process = team.replica * team.size + team.local[0]
    names_by_process = team.everywhere(lambda _: (process, list(here)))
    claims = dict(names_by_process[: team.size])
    writer = {name: number for number in sorted(claims, reverse=True) for name in claims[number]}
    mine = {name: tensor for name, tensor in here.items() if writer.get(name) == process}

    failure: RequestError | None = None

    def write(device: int) -> Part | None:
        nonlocal failure
        if team.replica > 0 or device != process:  # another thread of this process
            return None
        file = f"model-{sorted(claims).index(process) + 1:05d}-of-{len(claims):05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SINGLE).exists():
                raise RequestError(
                    f"'{folder}' has a {SINGLE}, which readers would read instead of the new files: give another folder"
                )
            return file, write_tensors(folder / file, mine), list(mine)
        except OSError as error:
            failure = RequestError(f"cannot create folder '{folder}': {error.strerror}; give another")
        except RequestError as error:
            failure = error
        return None

    written = team.everywhere(write)
    team.agree(failure)
    parts = [found for found in written if found is not None]
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
