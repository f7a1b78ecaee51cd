"""A checkpoint: tensors by name in one or many safetensors files, in the layout of transformers."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import RequestError
from ...core.files.json_reader import parse_json
from ...core.files.read import file_below, read_text
from ...core.wording import first_of
from .tensor_files import DTYPES, Entry, TensorFile, write_tensors, write_whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The location of every tensor of a checkpoint. Only the files' headers are in memory.

    Args:
        path: a ``.safetensors`` file, an index (``model.safetensors.index.json``), or a folder with either.

    Raises:
        RequestError: there is none, or one of its files is missing, of another kind or truncated.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _entry_point(Path(path))
        self._files: dict[str, TensorFile] = {}
        if self.path.suffix == ".json":
            for name, file in _indexed(self.path).items():
                self._files[name] = file
        else:
            only = TensorFile(self.path)
            self._files = dict.fromkeys(only.entries, only)
        self._without_wrappers = {without_wrappers(name): name for name in self._files}

    def find(self, names: Iterable[str]) -> str | None:
        """The first of a tensor's names that the checkpoint has, with or without the prefixes of wrapped modules."""
        names = list(names)
        others = (self._without_wrappers.get(without_wrappers(name)) for name in names)
        return next((name for name in names if name in self._files), None) or next(filter(None, others), None)

    def entry(self, name: str) -> Entry:
        """A tensor's location in its file."""
        return self._files[name].entries[name]

    def check(self, name: str, kind: str, tensor: Tensor) -> None:
        """Refuse a tensor of another shape or another kind of dtype than the model's.

        Args:
            name: the tensor's name in the checkpoint.
            kind: "parameter" or "buffer".
            tensor: the model's; may be on meta.
        """
        entry, where = self.entry(name), self._files[name].path
        if entry.shape != tuple(tensor.shape):
            raise RequestError(
                f"{kind} '{name}' has shape {entry.shape} in '{where}' and {tuple(tensor.shape)} in the model: they "
                "must be equal; give the checkpoint of this model, or build the model with its sizes"
            )
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or _kind(dtype) != _kind(tensor.dtype):
            raise RequestError(
                f"{kind} '{name}' is {entry.dtype} in '{where}' and {tensor.dtype} in the model: only floating-point "
                "types are converted to each other; convert the checkpoint"
            )

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with those of the checkpoint, in the order of the files' bytes.

        Args:
            tensors: by name in the checkpoint.
        """
        order = {name: (str(self._files[name].path), self.entry(name).start) for name in tensors}
        for name in sorted(tensors, key=lambda name: order[name]):
            self._files[name].read_into(name, tensors[name])

    def lacking(self, missing: Sequence[str], wanted: int) -> RequestError:
        """The error for parameters that the checkpoint does not have.

        Args:
            missing: their names; at least one.
            wanted: how many the step reads.
        """
        named = first_of([f"'{name}'" for name in missing])
        fix = _prefix_advice(missing, self._files) or "give the checkpoint of this model"
        return RequestError(
            f"'{self.path}' lacks parameter {named} of the {wanted} that the step reads: each needs a value; {fix}"
        )


def without_wrappers(name: str) -> str:
    """A tensor's name without what ``torch.compile`` and ``DistributedDataParallel`` add to it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "integer"


def _entry_point(path: Path) -> Path:
    """The index or file of a path, which may be a folder."""
    if not path.is_dir():
        return path
    for name in (INDEX, SINGLE):
        if (path / name).is_file():
            return path / name
    raise RequestError(f"folder '{path}' has neither {INDEX} nor {SINGLE}: give the file itself, or another folder")


def _indexed(index: Path) -> dict[str, TensorFile]:
    text = read_text(index)
    try:
        found = parse_json(text, "the file")
    except RequestError as error:
        raise RequestError(f"'{index}' is not the index of a checkpoint: {error}") from None
    pairs = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(pairs, dict) or not all(isinstance(file, str) for file in pairs.values()):
        raise RequestError(
            f"'{index}' is not the index of a checkpoint: it is JSON with a 'weight_map' of names to files; "
            "give model.safetensors.index.json or the folder it is in"
        )
    opened: dict[str, TensorFile] = {}
    for name, file in pairs.items():
        if file not in opened:
            part = file_below(index.parent, file, index, also=_blobs(index))
            if not os.path.isfile(part):  # unlike Path.is_file, False for names that are too long
                raise RequestError(
                    f"'{index}' names '{file}', which is not in its folder: an index and its files must be in one "
                    "folder; copy the file there"
                )
            opened[file] = TensorFile(part)
        if name not in opened[file].entries:
            raise RequestError(
                f"'{index}' says that '{name}' is in '{file}', but that file does not have it: index and files are of "
                "different checkpoints; copy both again"
            )
    return {name: opened[file] for name, file in pairs.items()}


def _blobs(index: Path) -> Path | None:
    """The folder of the files in huggingface_hub's cache, where ``snapshots/REVISION`` has links to ``blobs``."""
    snapshots = index.absolute().parent.parent
    return snapshots.parent / "blobs" if snapshots.name == "snapshots" else None


def _prefix_advice(missing: Sequence[str], names: Iterable[str]) -> str:
    """The fix if the checkpoint has the missing names with another prefix; empty if it has not."""
    there = set(names)
    first = missing[0]
    longer = [name.removesuffix(first) for name in there if name.endswith(f".{first}")]
    shorter = [first.removesuffix(name) for name in there if first.endswith(f".{name}")]
    for prefix in longer:
        if all(prefix + name in there for name in missing):
            return (
                f"it has them with the prefix '{prefix}': give the module with these names, or rename them in the file"
            )
    for prefix in shorter:
        if all(name.removeprefix(prefix) in there for name in missing):
            return f"it has them without '{prefix}': give the module with these names, or rename them there"
    return ""


def write_part(folder: Path, number: int, parts: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write one process's part of a checkpoint.

    Args:
        folder: created if it does not exist.
        number: of the part, from 0.
        parts: how many there are.
        tensors: by name.

    Returns:
        The file's name, and bytes of its tensors.

    Raises:
        RequestError: the file cannot be written.
    """
    name = f"model-{number + 1:05d}-of-{parts:05d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot create folder '{folder}': {error.strerror}; give another") from None
    if (folder / SINGLE).exists():
        raise RequestError(
            f"'{folder}' has a {SINGLE}, which readers would read instead of the new files: give another folder"
        )
    return name, write_tensors(folder / name, tensors)


def write_index(folder: Path, where: Mapping[str, str], size: int) -> None:
    """Write the index, last: it makes a checkpoint complete.

    Args:
        folder: the checkpoint's.
        where: name of a tensor → its file.
        size: bytes of all tensors.
    """
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    write_whole(folder / INDEX, [json.dumps(index, indent=2).encode()])
