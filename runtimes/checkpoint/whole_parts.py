"""Checkpoints of models with tensor ranks: parts are joined to whole tensors for writing, and cut again for reading.

    part of each rank ──gather──▶ whole ──▶ files          files ──▶ whole ──narrow──▶ part of this rank

``state_dict`` and ``load_state_dict`` do the same without files. So training can resume over another number of tensor
ranks, or without any.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ..launch.tensor_team import Split, TensorTeam
from .manifest import Manifest
from .reading import CheckpointReader, StoredTensor
from .state_parts import Parts


def split_of(name: str, tensor: Tensor, team: TensorTeam) -> Split | None:
    """How a tensor of a checkpoint is divided over tensor ranks; None if each has all of it.

    Args:
        name: of the tensor in the checkpoint.
        tensor: this rank's.
        team: the tensor ranks.
    """
    section, _, rest = name.partition(".")
    names = [rest]
    if section == "ema":
        names = [rest.split(".", 2)[-1]]
    elif section == "optimizer":
        words = rest.removeprefix("state.").split(".")
        names = [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]
    found = (team.split_of(each, tuple(tensor.shape)) for each in names)
    return next((split for split in found if split is not None), None)


def gathered(parts: Parts, team: TensorTeam) -> Parts:
    """The parts with whole tensors. All tensor ranks of a stage call this together."""
    found = dict(parts.tensors)
    for name, tensor in sorted(parts.tensors.items()):
        split = split_of(name, tensor, team)
        if split is not None:
            found[name] = team.gather(tensor, split)
    return Parts(found, parts.items)


def narrowed(parts: Parts, own: Mapping[str, Tensor], team: TensorTeam) -> Parts:
    """The parts with this rank's parts of whole tensors; those of other shapes stay, and are refused with these.

    Args:
        parts: with whole tensors, and perhaps more than this rank needs.
        own: this rank's tensors, by name.
        team: the tensor ranks.
    """
    found = dict(parts.tensors)
    for name, tensor in own.items():
        split = split_of(name, tensor, team)
        if split is not None and name in found and split.part_shape(tuple(found[name].shape)) == tuple(tensor.shape):
            found[name] = split.part_of(found[name]).clone()
    return Parts(found, parts.items)


class PartReader:
    """Reads this rank's parts of a checkpoint's tensors; otherwise as `CheckpointReader`.

    Args:
        reader: of the checkpoint.
        own: this rank's tensors, by name in the checkpoint.
        team: the tensor ranks.
    """

    def __init__(self, reader: CheckpointReader, own: Mapping[str, Tensor], team: TensorTeam) -> None:
        self._reader = reader
        self._splits = {
            name: split for name, tensor in own.items() if (split := split_of(name, tensor, team)) is not None
        }
        self.tensors = {name: self._part(name, kept) for name, kept in reader.tensors.items()}
        self.items: Mapping[str, Any] = reader.items

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's files."""
        return self._reader.manifest

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self._reader.folder

    def files_of(self, tensors: Collection[str]) -> list[str]:
        """The files that have these tensors."""
        return self._reader.files_of(tensors)

    def check(self, files: Collection[str]) -> None:
        """Compare files with their hashes; see `CheckpointReader.check`."""
        self._reader.check(files)

    def refuse_changed(self) -> None:
        """Refuse files that were written since they were checked."""
        self._reader.refuse_changed()

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with this rank's parts of those of the checkpoint."""
        self._reader.read_into({name: tensor for name, tensor in tensors.items() if name not in self._splits})
        for name, split in self._splits.items():
            if name in tensors:
                kept = self._reader.tensors[name]
                whole = torch.empty(kept.shape, dtype=kept.dtype)
                self._reader.read_into({name: whole})
                with torch.no_grad():
                    tensors[name].detach().copy_(split.part_of(whole))

    def _part(self, name: str, kept: StoredTensor) -> StoredTensor:
        """What this rank reads of a tensor; one that cannot be divided keeps its shape, and is refused with it."""
        part = self._splits[name].part_shape(kept.shape) if name in self._splits else None
        return kept if part is None else evolve(kept, shape=part)
