"""Reading a checkpoint: its files are checked against the manifest first, and then read into tensors of a pipeline.

Where ranks share stages, parts are joined to whole tensors for writing, and cut again for reading, so that training can
resume over another number of them; ``state_dict`` and ``load_state_dict`` do the same without files::

    part of each rank ──gather──▶ whole ──▶ files          files ──▶ whole ──narrow──▶ part of this rank
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.errors import PanpipeError, RequestError, in_a_line
from ..launch.rank_tensors import RankTensors, Split
from ..weights.checkpoint import DTYPES, TensorFile
from .manifest import Manifest, check_file, check_listing, read_manifest, read_record
from .state_parts import Parts, read_items

_MOST_DIMENSIONS = 64


@frozen
class StoredTensor:
    """A tensor in a checkpoint.

    Args:
        shape, dtype: of the tensor.
        file: that has its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: TensorFile


@define
class CheckpointReader:
    """A checkpoint whose parts are known by name; `check` has to come before `read_into`.

    Attributes:
        manifest: its files.
        tensors, items: its parts by name.

    Raises:
        RequestError: it is not whole, or was not written by panpipe. The message names the file.
    """

    folder: Path
    manifest: Manifest = field(init=False)
    tensors: dict[str, StoredTensor] = field(factory=dict, init=False)
    items: dict[str, Any] = field(factory=dict, init=False)
    _checked: dict[str, tuple[int, ...]] = field(factory=dict, init=False)
    _splits: dict[str, tuple[Split, StoredTensor]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.manifest = read_manifest(self.folder)
        with self._named():
            check_listing(self.folder, self.manifest)
        others: dict[str, torch.dtype] = {}
        for name in self.manifest.files:
            if name.startswith("items-"):
                self.check([name])  # its bytes are parsed
                with self._named(name):
                    items, dtypes = read_items(self.folder / name)
                self._refuse_twice(name, self.items, items)
                self.items |= items
                others |= dtypes
        for name in self.manifest.files:
            if name.startswith("tensors-"):
                found = self._tensors_in(name, others)
                self._refuse_twice(name, {**self.items, **self.tensors}, found)
                self.tensors |= found

    def files_of(self, tensors: Collection[str]) -> list[str]:
        """The files that have these tensors."""
        return sorted({self.tensors[name].file.path.name for name in tensors})

    def check(self, files: Collection[str]) -> None:
        """Compare files with their hashes.

        Raises:
            RequestError: one was changed; the message names it.
        """
        for name in files:
            if name not in self._checked:
                with self._named(name):
                    before = self._version(name)
                    found = read_record(self.folder / name)
                check_file(self.folder, name, self.manifest.files[name], found)
                self._checked[name] = before

    def refuse_changed(self) -> None:
        """Refuse files that were written since they were checked.

        Raises:
            RequestError: the message names the first one.
        """
        for name, before in self._checked.items():
            with self._named(name):
                if self._version(name) != before:
                    raise RequestError(f"'{self.folder / name}' was written while it was read: {_FOREIGN}")

    def _version(self, name: str) -> tuple[int, ...]:
        found = (self.folder / name).lstat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def narrow(self, own: Mapping[str, Tensor], ranks: RankTensors) -> None:
        """Read this rank's parts of tensors from now on.

        Args:
            own: this rank's tensors, by name in the checkpoint.
        """
        for name, tensor in own.items():
            split, stored = split_of(name, tensor, ranks), self.tensors.get(name)
            part = None if split is None or stored is None else split.part_shape(stored.shape)
            if split is not None and stored is not None and part is not None:  # others are refused with their shapes
                self._splits[name], self.tensors[name] = (split, stored), evolve(stored, shape=part)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors of the same shapes and dtypes with those of the checkpoint.

        Args:
            tensors: by name in the checkpoint.
        """
        with torch.no_grad():
            for name in sorted(tensors, key=self._place):
                if name in self._splits:
                    split, stored = self._splits[name]
                    whole = torch.empty(stored.shape, dtype=stored.dtype)
                    self._read(stored, name, whole)
                    tensors[name].detach().copy_(split.part_of(whole))
                else:
                    self._read(self.tensors[name], name, tensors[name].detach())

    def _read(self, kept: StoredTensor, name: str, tensor: Tensor) -> None:
        """Overwrite a tensor of the same shape and dtype with a stored one, which may be stored as bytes."""
        if DTYPES.get(kept.file.entries[name].dtype) == kept.dtype:
            kept.file.read_into(name, tensor)
        else:
            data = torch.empty(*kept.shape, kept.dtype.itemsize, dtype=torch.uint8)
            kept.file.read_into(name, data)
            tensor.copy_(data.reshape(-1).view(kept.dtype).reshape(kept.shape))

    def whole(self) -> Parts:
        """All parts, with tensors on the CPU; every file is checked."""
        self.check(self.manifest.files)
        tensors = {name: torch.empty(kept.shape, dtype=kept.dtype) for name, kept in self.tensors.items()}
        self.read_into(tensors)
        return Parts(tensors, self.items)

    def _place(self, name: str) -> tuple[str, int]:
        file = self.tensors[name].file
        return file.path.name, file.entries[name].start

    def _tensors_in(self, name: str, others: Mapping[str, torch.dtype]) -> dict[str, StoredTensor]:
        with self._named(name):
            try:
                file = TensorFile(self.folder / name)
            except RequestError:
                self.check([name])  # a file that was changed is refused with its hash
                raise
            found = {}
            for tensor, entry in file.entries.items():
                shape, dtype = entry.shape, DTYPES.get(entry.dtype)
                if tensor in others:
                    dtype, (*shape_of, size) = others[tensor], shape or (0,)
                    if entry.dtype != "U8" or size != dtype.itemsize:
                        raise ValueError(f"'{tensor[:100]}' does not have the bytes of {dtype}")
                    shape = tuple(shape_of)
                if dtype is None or len(shape) > _MOST_DIMENSIONS or any(size >= 1 << 63 for size in shape):
                    raise ValueError(f"'{tensor[:100]}' is not a tensor of a checkpoint")
                found[tensor] = StoredTensor(shape, dtype, file)
            return found

    def _refuse_twice(self, file: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        twice = next((name for name in found if name in known), None)
        if twice is not None:
            raise RequestError(f"'{self.folder / file}' has '{twice[:100]}', which another file has: {_FOREIGN}")

    @contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """A context that raises what a damaged or hostile file causes as a RequestError with the file's name."""
        path = self.folder / name if name else self.folder
        try:
            yield
        except PanpipeError:
            raise
        except OSError as error:
            raise RequestError(
                f"cannot read '{path}': {error.strerror}; every rank must be able to read the checkpoint"
            ) from None
        except Exception as error:
            raise RequestError(f"'{path}' cannot be read ({in_a_line(error)[:300]}): {_FOREIGN}") from None


_FOREIGN = "it was not written by panpipe; resume from another checkpoint"


def split_of(name: str, tensor: Tensor, ranks: RankTensors) -> Split | None:
    """How a tensor of a checkpoint is divided over ranks; None if each has all of it.

    Args:
        name: of the tensor in the checkpoint.
        tensor: this rank's.
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
    """
    found = dict(parts.tensors)
    for name, tensor in own.items():
        split = split_of(name, tensor, ranks)
        if split is not None and name in found and split.part_shape(tuple(found[name].shape)) == tuple(tensor.shape):
            found[name] = split.part_of(found[name]).clone()
    return Parts(found, parts.items)
