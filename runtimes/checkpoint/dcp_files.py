"""Conversion to and from checkpoints of ``torch.distributed.checkpoint`` (DCP).

Its values are files of ``torch.save``, which ``torch.load(…, weights_only=True)`` reads. Its metadata is a pickle of
DCP's classes, which torch has no safe reader for: here the pickle may name those classes, as records that only hold
fields, and nothing else. What is read is bounded by the size of the files: a few bytes of a pickle can be a tuple whose
hash takes forever, or a list of lists of lists.
"""

import io
import math
import operator
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from ...core.errors import PanpipeError, RequestError, in_a_line
from ...core.files.limits import short
from ...core.files.read import file_below, open_regular, read_bytes
from ..launch.exchange import ONE_PROCESS
from .durable_files import cannot_write
from .manifest import DCP_METADATA
from .reading import CheckpointReader
from .state_parts import Parts, parts_of, state_of
from .writing import Save, begin_save

ROOT = "pipe"
"""The name of a pipeline in DCP's checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""
_MOST_METADATA = 1 << 30
"""Most bytes of DCP's metadata."""
_MOST_DIMENSIONS = 64
_DEEPEST = 100
"""Most nested lists, tuples and dicts of a value."""
_FEW_VALUES = 1_000_000
"""This many values a value may have in any case; a larger file may have one for each of its bytes."""
_MOST_SHARED = 32
"""Most times that a value may name a tuple again: n times can make it as large as 1.45ⁿ of it."""


class _Record:
    """An instance of a class of DCP's metadata, as its fields; equal only to itself."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state


def _size(values: Any) -> tuple[int, ...]:
    """A shape or offsets, from a ``torch.Size``."""
    found = tuple(operator.index(value) for value in values)
    if len(found) > _MOST_DIMENSIONS or not all(0 <= size < 1 << 63 for size in found):
        raise ValueError("it has a shape of too many dimensions, or with sizes that are negative or beyond 2⁶³")
    return found


_MODULE = "torch.distributed.checkpoint"
_RECORDS = (
    *((f"{_MODULE}.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_MODULE}.filesystem", "_StorageInfo"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
)  # fmt: skip
"""The classes that the pickle of DCP's metadata may name."""
_VALUES: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): lambda: {},
}
"""What else it may name, and what is used in its place."""


class _MetadataReader(pickle._Unpickler):
    """Python's unpickler in Python: the one in C allocates a table as large as a number in the pickle says."""

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # Classes of this file alone: a pickle can set attributes of classes.
        self._names = {**_VALUES, **{(module, name): type(name, (_Record,), {}) for module, name in _RECORDS}}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module[:100]}.{name[:100]}, which is not plain data")

    def _set(self, code: int) -> None:
        keys = self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]
        if not all(isinstance(key, str | _Record) for key in keys):
            raise pickle.UnpicklingError("it has a key that is neither a text nor a place")
        load: Any = pickle._Unpickler.dispatch[code]
        load(self)

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.LONG4, pickle.DICT)
    } | {code[0]: lambda self, code=code[0]: self._set(code) for code in (pickle.SETITEM, pickle.SETITEMS)}


def import_checkpoint(source: str | Path, folder: str | Path) -> None:
    """Convert a checkpoint of DCP, of a pipeline: ``dcp.save({"pipe": pipe}, …)``, or of panpipe's older versions.

    One process reads all of it into memory.

    Args:
        source: the folder of DCP's files.
        folder: of the new checkpoint.

    Raises:
        RequestError: it is no such checkpoint, or a pickle in it names anything but tensors, plain data and DCP's
            metadata.
    """
    source, folder = Path(source), Path(folder).absolute()
    try:
        parts = _parts_in(source)
        steps = parts.items.get("progress.steps")
        state_of(parts)  # refuses names of other sections
    except PanpipeError:
        raise
    except Exception as error:
        raise RequestError(
            f"'{source}' cannot be read as a checkpoint of torch.distributed.checkpoint: {in_a_line(error)[:300]}"
        ) from None
    if type(steps) is not int or not 0 <= steps < 1 << 63:
        raise RequestError(f"'{source}' has no '{ROOT}.progress.steps': it is not a checkpoint of a pipeline")
    Save(folder, begin_save(folder), parts, steps, None, 1).run(ONE_PROCESS)


def _parts_in(source: Path) -> Parts:
    found: Any = _MetadataReader(read_bytes(source / DCP_METADATA, _MOST_METADATA)).load()
    places = {_place(**vars(index)): place for index, place in found.storage_data.items()}
    files = _Files(source)
    parts = Parts()
    for name, kept in found.state_dict_metadata.items():
        if not name.startswith(f"{ROOT}."):
            raise ValueError(f"it has {short(name)}, but a checkpoint of a pipeline is saved from {{'{ROOT}': pipe}}")
        own = name.removeprefix(f"{ROOT}.")
        if type(kept).__name__ == "BytesStorageMetadata":
            parts.items[own] = files.value(places[name, None])
        else:
            parts.tensors[own] = _whole(name, kept, places, files)
    return parts_of(state_of(parts))  # options that are tensors become items


def _place(fqn: str, offset: Any = None, index: Any = None) -> tuple[str, tuple[int, ...] | None]:
    """The name of a value and the offsets of a part of it."""
    if not isinstance(fqn, str):
        raise ValueError("it has a name that is no text")
    return fqn, None if offset is None else _size(offset)


def _whole(name: str, kept: Any, places: Mapping[Any, Any], files: "_Files") -> Tensor:
    """A tensor of its chunks, which must cover it without overlapping."""
    dtype, size = kept.properties.arguments[0], _size(kept.size)
    if math.prod(size) * dtype.itemsize > files.most_bytes:
        raise ValueError(f"{short(name)} has a shape of more bytes than the files have")
    whole, written = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
    for chunk in kept.chunks:
        values = files.value(places[name, _size(chunk.offsets)])
        place = tuple(slice(at, at + size) for at, size in zip(_size(chunk.offsets), _size(chunk.sizes), strict=True))
        if not isinstance(values, Tensor) or values.shape != whole[place].shape or values.dtype != dtype:
            raise ValueError(f"{short(name)} has values of another shape or dtype than its metadata")
        whole[place] = values
        written[place] = True
    if not written.all():
        raise ValueError(f"{short(name)} has values for only a part of its shape")
    return whole


class _Files:
    """The files with the values.

    Args:
        source: their folder.

    Attributes:
        most_bytes: of all of them.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self.most_bytes = sum(path.stat().st_size for path in source.iterdir())
        self._left = self.most_bytes

    def value(self, place: Any) -> Any:
        """What ``torch.save`` wrote at a place of a file. All places together have no more bytes than the files."""
        name, offset, length = place.relative_path, place.offset, place.length
        if Path(name).name != name:
            raise ValueError("its metadata names a file outside of its folder")
        self._left -= length
        if offset < 0 or length < 0 or self._left < 0:
            raise ValueError("its metadata names more bytes than the files have")
        with open_regular(file_below(self._source, name, self._source / DCP_METADATA)) as file:
            file.seek(offset)
            return _saved(file.read(length))


def _saved(data: bytes) -> Any:
    """The tensor or plain data in a file of ``torch.save``; tensors are on the CPU.

    Raises:
        Exception: it is no such file, is compressed, or has anything else; of any class.
    """
    if not data.startswith(b"PK"):
        raise ValueError("it is no archive")  # torch.load would read it as a pickle alone
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it has a compressed file, and torch.save writes none")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("it has files that share bytes")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _refuse_shared_tuples(archive.read(entry))
    try:
        value = torch.load(io.BytesIO(data), "cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its advice is to run the code
        why = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise ValueError(f"it has a value that is not plain data ({why})") from None
    _check_size(value, max(len(data), _FEW_VALUES))
    return value


def _refuse_shared_tuples(pickled: bytes) -> None:
    """Refuse tuples of tuples: as the key of a dict, one of a few bytes has a hash that takes forever."""
    tuples, top, shared = set[Any](), "", 0
    for code, argument, _ in pickletools.genops(pickled):
        if "PUT" in code.name:
            (tuples.add if top == "TUPLE" else tuples.discard)(argument)
        else:
            top = "TUPLE" if "TUPLE" in code.name or ("GET" in code.name and argument in tuples) else ""
            shared += bool(top) and "GET" in code.name
    if shared > _MOST_SHARED:
        raise ValueError(f"it names tuples again more than {_MOST_SHARED} times")


def _check_size(value: Any, most: int) -> None:
    """Refuse a value of many parts or bytes; a part counts as often as it is named."""
    level, count = [value], 0
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for each in level:
            if isinstance(each, Tensor):
                count += each.numel() * each.dtype.itemsize
            elif isinstance(each, Mapping | list | tuple | set):
                count += len(each)
                below += each
                below += each.values() if isinstance(each, Mapping) else ()
            if count > most:
                raise ValueError("it has more values than its file has bytes")
        level = below
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def export_checkpoint(folder: str | Path, target: str | Path) -> None:
    """Convert a checkpoint of `Pipeline.checkpoint` to one of DCP, for its tools and for plain PyTorch.

    One process reads all of it into memory. DCP writes its metadata as a pickle.

    Args:
        folder: of the checkpoint.
        target: the folder of DCP's files; it must not have a checkpoint yet.

    Raises:
        RequestError: there is no whole checkpoint, or the target cannot be written.
    """
    state, target = state_of(CheckpointReader(Path(folder).absolute()).whole()), Path(target)
    if (target / DCP_METADATA).exists():
        raise RequestError(f"'{target}' holds a checkpoint: give a new folder")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_saver.save({ROOT: state}, checkpoint_id=target, no_dist=True)
    except OSError as error:
        raise cannot_write(target, error) from None
    except Exception as error:
        raise RequestError(f"'{target}' cannot be written: {in_a_line(error)[:300]}; give another folder") from None
