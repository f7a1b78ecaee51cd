"""Checkpoints where ranks share stages: parts are joined to whole tensors for writing, and cut again for reading.

    part of each rank ──gather──▶ whole ──▶ files          files ──▶ whole ──narrow──▶ part of this rank

``state_dict`` and ``load_state_dict`` do the same without files. So training can resume over another number of them.
"""

from collections.abc import Mapping

import torch
from attrs import define, evolve, field
from torch import Tensor

from ..launch.rank_tensors import RankTensors, Split
from .reading import CheckpointReader, StoredTensor
from .state_parts import Parts


def split_of(name: str, tensor: Tensor, ranks: RankTensors) -> Split | None:
    """How a tensor of a checkpoint is divided over ranks; None if each has all of it.

    Args:
        name: of the tensor in the checkpoint.
        tensor: this rank's.
        ranks: what each has of the tensors.
    """
    section, _, rest = name.partition(".")
    names = [rest]
    if section == "ema":
        names = [rest.split(".", 2)[-1]]
    elif section == "optimizer":
        words = rest.removeprefix("state.").split(".")
        names = [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]
    found = (ranks.split_of(each, tuple(tensor.shape)) for each in names)
    return next((split for split in found if split is not None), None)


def gathered(parts: Parts, ranks: RankTensors) -> Parts:
    """The parts with whole tensors. All ranks of a stage call this together."""
    found = dict(parts.tensors)
    for name, tensor in sorted(parts.tensors.items()):
        split = split_of(name, tensor, ranks)
        if split is not None:
            found[name] = ranks.gather(tensor, split)
    return Parts(found, parts.items)


def narrowed(parts: Parts, own: Mapping[str, Tensor], ranks: RankTensors) -> Parts:
    """The parts with this rank's parts of whole tensors; those of other shapes stay, and are refused with these.

    Args:
        parts: with whole tensors, and perhaps more than this rank needs.
        own: this rank's tensors, by name.
        ranks: what each has of the tensors.
    """
    found = dict(parts.tensors)
    for name, tensor in own.items():
        split = split_of(name, tensor, ranks)
        if split is not None and name in found and split.part_shape(tuple(found[name].shape)) == tuple(tensor.shape):
            found[name] = split.part_of(found[name]).clone()
    return Parts(found, parts.items)


@define
class PartReader(CheckpointReader):
    """Reads this rank's parts of a checkpoint's tensors; otherwise as `CheckpointReader`.

    Args:
        own: this rank's tensors, by name in the checkpoint.
        ranks: what each has of the tensors.
    """

    own: Mapping[str, Tensor] = field(kw_only=True)
    ranks: RankTensors = field(kw_only=True)
    _splits: dict[str, Split] = field(factory=dict, init=False)
    _stored: dict[str, StoredTensor] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        CheckpointReader.__attrs_post_init__(self)
        for name, tensor in self.own.items():
            split = split_of(name, tensor, self.ranks)
            part = split.part_shape(self.tensors[name].shape) if split is not None and name in self.tensors else None
            if split is not None and part is not None:  # others keep their shapes, and are refused with them
                self._splits[name], self._stored[name] = split, self.tensors[name]
                self.tensors[name] = evolve(self.tensors[name], shape=part)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with this rank's parts of those of the checkpoint."""
        CheckpointReader.read_into(self, {n: tensor for n, tensor in tensors.items() if n not in self._splits})
        for name in self._splits.keys() & tensors.keys():
            kept = self._stored[name]
            whole = torch.empty(kept.shape, dtype=kept.dtype)
            self._read(kept, name, whole)
            with torch.no_grad():
                tensors[name].detach().copy_(self._splits[name].part_of(whole))
