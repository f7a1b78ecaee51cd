"""A checkpoint: tensors by name in one or many safetensors files, in the layout of transformers.

Files are read and written a piece of a tensor at a time. The safetensors library reads the header and checks all of it;
the values are read here. To read them, the library maps the file a second time, private and writable (0.8.0,
`safe_open` of a file of 1 GiB): with a limit on data (``ulimit -d``) below the file's size, or on addresses (``ulimit
-v``) below twice that, it cannot be opened, and a file that is cut off meanwhile ends the process by SIGBUS. This
module has at most one piece in memory, and needs addresses for the file once.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...core.errors import RequestError, in_a_line
from ...core.files.json_reader import parse_json
from ...core.files.read import file_below, open_regular, read_text
from ...core.files.write import replace_file
from ...core.wording import first_of
from ..flat_bytes import flat_bytes
from ..launch.team import Team
from ..watch.activity import HERE
from .places import places, tensor_at

_PIECE_BYTES = 8 << 20
_LONGEST_NAME = 1024
_MOST_DIMENSIONS = 64

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The format's names of dtypes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
"""Bits of a value; 8 in the format's other dtypes."""


@frozen(eq=False)
class Entry:
    """A tensor in a file.

    Args:
        stored_as: the format's name of the dtype of its values.
        dtype: None for one that torch does not have; another one than that of the values if these are its bytes.
        start: of its bytes in the file.
    """

    path: Path
    name: str
    stored_as: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int

    def read_into(self, tensor: Tensor) -> None:
        """Overwrite a tensor of the same shape; floating numbers are converted to its dtype."""
        if not tensor.is_contiguous():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.read_into(whole)
            tensor.copy_(whole)
            return
        dtype = DTYPES[self.stored_as]
        target = tensor.reshape(-1) if self.dtype == dtype else flat_bytes(tensor)
        piece = torch.empty(min(_PIECE_BYTES // dtype.itemsize, target.numel()), dtype=dtype)
        with open_regular(self.path) as file:
            file.seek(self.start)
            for first in range(0, target.numel(), max(len(piece), 1)):
                HERE.doing(f"reading '{self.name}'")
                part = piece[: target.numel() - first]
                if file.readinto(_bytes(flat_bytes(part))) != part.nbytes:
                    raise RequestError(f"'{self.path}' is truncated since it was opened: copy it again")
                target[first : first + len(part)].copy_(part)


def entries_of(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name, in the order of the file. Only its header is read.

    Raises:
        RequestError: it cannot be read, is of another kind, or is damaged.
    """
    with open_regular(path) as file:  # the library would wait for the writer of a pipe
        size, head = os.fstat(file.fileno()).st_size, file.read(8)
    if head.startswith((b"PK\3\4", b"\x80\2\x8a\n")):  # zip, or a pickle of a number before torch 1.6
        raise RequestError(
            f"'{path}' was written by torch.save, and Run(weights=) reads safetensors, which hold data alone: load it "
            f"into the model before, model.load_state_dict(torch.load('{path}', weights_only=True)), or convert it "
            f"once, safetensors.torch.save_file(torch.load('{path}', weights_only=True), "
            f"'{path.with_suffix('.safetensors').name}'); if the file has more than the weights, select them, such as "
            "torch.load(…)['model'] or torch.load(…)['state_dict']"
        )
    found, start = dict[str, Entry](), 8 + int.from_bytes(head, "little")
    try:
        with safe_open(path, framework="numpy") as tensors:  # that of torch maps the file a second time
            for name in tensors.offset_keys():  # their values are in this order, without gaps
                kept = tensors.get_slice(name)
                stored_as, shape = kept.get_dtype(), tuple(kept.get_shape())
                found[name] = Entry(path, name, stored_as, DTYPES.get(stored_as), shape, start)
                if len(name) > _LONGEST_NAME or not name.isprintable() or len(shape) > _MOST_DIMENSIONS:
                    raise ValueError("a tensor's name is too long or cannot be printed, or it has too many dimensions")
                start += prod(shape) * _BITS.get(stored_as, 8) // 8
        if start != size:
            raise ValueError("it has a dtype of an unknown size")
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        reason = "ulimit -v is below its size" if isinstance(error, MemoryError) else in_a_line(error)[:300]
        raise RequestError(
            f"'{path}', of {size} bytes, is not a whole safetensors file ({reason}): copy it again, or write one "
            "with safetensors.torch.save_file"
        ) from None
    return found


def read_tensors(entries: Mapping[str, Entry], into: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with stored ones of the same names, in the order of the files' bytes."""
    for name in sorted(into, key=lambda name: (str(entries[name].path), entries[name].start)):
        entries[name].read_into(into[name])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a safetensors file, under a temporary name until it is complete.

    Returns:
        Bytes of the tensors.

    Raises:
        RequestError: the format has no name for a dtype, or the file cannot be written.
    """
    write_whole(path, file_pieces(tensors))
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in pieces of some MB: its header, and the values of the tensors in their order.

    Raises:
        RequestError: the format has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise RequestError(f"'{name}' is {tensor.dtype}, which safetensors does not support: convert it")
        offsets = [at, at := at + tensor.numel() * tensor.dtype.itemsize]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file need aligned tensors
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        step = _PIECE_BYTES // tensor.dtype.itemsize
        for first in range(0, flat.numel(), step):
            yield _bytes(flat_bytes(flat[first : first + step].cpu()))


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file under a temporary name in the same folder, then rename it, so that no reader sees a part of it.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        replace_file(path, pieces, durable=True)
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give another folder") from None


def _bytes(flat: Tensor) -> memoryview:
    """The memory of uint8 on the host; NumPy does not have all dtypes of other tensors."""
    view: memoryview = flat.numpy().data
    return view


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
        self._entries = _indexed(self.path) if self.path.suffix == ".json" else entries_of(self.path)
        self._without_wrappers = {without_wrappers(name): name for name in self._entries}

    def find(self, names: Iterable[str]) -> str | None:
        """The first of a tensor's names that the checkpoint has, with or without the prefixes of wrapped modules."""
        names = list(names)
        others = (self._without_wrappers.get(without_wrappers(name)) for name in names)
        return next((name for name in names if name in self._entries), None) or next(filter(None, others), None)

    def check(self, name: str, kind: str, tensor: Tensor) -> None:
        """Refuse a tensor of another shape or another kind of dtype than the model's."""
        entry = self._entries[name]
        where = entry.path
        if entry.shape != tuple(tensor.shape):
            raise RequestError(
                f"{kind} '{name}' has shape {entry.shape} in '{where}' and {tuple(tensor.shape)} in the model: they "
                "must be equal; give the checkpoint of this model, or build the model with its sizes"
            )
        if entry.dtype is None or _kind(entry.dtype) != _kind(tensor.dtype):
            raise RequestError(
                f"{kind} '{name}' is {entry.stored_as} in '{where}' and {tensor.dtype} in the model: only "
                "floating-point types are converted to each other; convert the checkpoint"
            )

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with those of the checkpoint."""
        read_tensors(self._entries, tensors)

    def lacking(self, missing: Sequence[str], wanted: int) -> RequestError:
        """The error for parameters that the checkpoint does not have."""
        named = first_of([f"'{name}'" for name in missing])
        fix = _prefix_advice(missing, self._entries) or "give the checkpoint of this model"
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


def _indexed(index: Path) -> dict[str, Entry]:
    """The entries of all files of an index."""
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
    opened: dict[str, dict[str, Entry]] = {}
    for name, file in pairs.items():
        if file not in opened:
            part = file_below(index.parent, file, index, also=_blobs(index))
            if not os.path.isfile(part):  # unlike Path.is_file, False for names that are too long
                raise RequestError(
                    f"'{index}' names '{file}', which is not in its folder: an index and its files must be in one "
                    "folder; copy the file there"
                )
            opened[file] = entries_of(part)
        if name not in opened[file]:
            raise RequestError(
                f"'{index}' says that '{name}' is in '{file}', but that file does not have it: index and files are of "
                "different checkpoints; copy both again"
            )
    return {name: opened[file][name] for name, file in pairs.items()}


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
