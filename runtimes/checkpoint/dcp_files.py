"""Conversion to and from checkpoints of ``torch.distributed.checkpoint`` (DCP).

DCP's metadata is a pickle, and its items are files of ``torch.save``. They are read with unpicklers that build only
plain data, and refuse whatever else a pickle names.
"""

import io
import math
import operator
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from ...core.errors import PanpipeError, RequestError, in_a_line
from ...core.files.read import read_bytes
from ..launch.exchange import OneProcess
from .durable_files import cannot_write
from .manifest import DCP_METADATA
from .reading import CheckpointReader
from .state_parts import Parts, parts_of, state_of
from .writing import Save, begin

ROOT = "pipe"
"""The name of a pipeline in DCP's checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""

_MOST_METADATA = 1 << 30
"""Most bytes of DCP's metadata."""
_MOST_IN_TUPLE = 4096
"""Most values of a tuple in it, with those of tuples inside."""
_MODULE = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        *((f"{_MODULE}.metadata", name) for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        (f"{_MODULE}.filesystem", "_StorageInfo"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    }
)  # fmt: skip
"""The classes that the pickle of DCP's metadata may name. Their instances become records, which only hold fields."""


def _size(values: Any) -> tuple[int, ...]:
    return tuple(operator.index(value) for value in values)


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("the name of a layout in it is not a string")
    return name


_VALUES: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
}
"""What else it may name, and what is used in its place."""


class _Record:
    """An instance of a class of DCP's metadata, as its fields."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state


class _MetadataUnpickler(pickle._Unpickler):
    """Builds records and plain data alone, whatever a pickle says.

    It is Python's unpickler in Python: the one in C allocates a table as large as a number in the pickle. Tuples of
    tuples are bounded, because a few bytes make one whose hash takes forever.
    """

    stack: list[Any]

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._records: dict[str, type[_Record]] = {}
        self._tuples: dict[int, tuple[tuple[Any, ...], int]] = {}  # the tuple keeps its id

    def _load_tuple(self, code: int) -> None:
        load: Any = pickle._Unpickler.dispatch[code]
        load(self)
        made = self.stack[-1]
        size = 1 + sum(self._tuples[id(each)][1] if id(each) in self._tuples else 1 for each in made)
        if size > _MOST_IN_TUPLE:
            raise pickle.UnpicklingError(f"it has a tuple of more than {_MOST_IN_TUPLE} values")
        self._tuples[id(made)] = made, size

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **{
            code[0]: lambda self, code=code[0]: self._load_tuple(code)
            for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:  # a class of this file alone: a pickle can set attributes of classes
            return self._records.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong to DCP's metadata")


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
    if not isinstance(steps, int) or steps < 0:
        raise RequestError(f"'{source}' has no '{ROOT}.progress.steps': it is not a checkpoint of a pipeline")
    Save(folder, begin(folder), parts, steps, None, 1).run(OneProcess())


def _parts_in(source: Path) -> Parts:
    found = _MetadataUnpickler(io.BytesIO(read_bytes(source / DCP_METADATA, _MOST_METADATA))).load()
    places = {(index.fqn, vars(index).get("offset")): place for index, place in found.storage_data.items()}
    most_bytes = sum(path.stat().st_size for path in source.iterdir())
    parts = Parts()
    for name, kept in found.state_dict_metadata.items():
        if not name.startswith(f"{ROOT}."):
            raise ValueError(f"it has '{name[:100]}', but a checkpoint of a pipeline is saved from {{'{ROOT}': pipe}}")
        own = name.removeprefix(f"{ROOT}.")
        if type(kept).__name__ == "BytesStorageMetadata":
            parts.items[own] = _loaded(source, places[name, None])
            continue
        dtype, size = kept.properties.arguments[0], tuple(kept.size)
        if math.prod(size) * dtype.itemsize > most_bytes or not all(0 <= each < 1 << 63 for each in size):
            raise ValueError(f"'{name[:100]}' has a shape of more bytes than the files have")
        whole = torch.zeros(size, dtype=dtype)
        for chunk in kept.chunks:
            values = _loaded(source, places[name, tuple(chunk.offsets)])
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if not isinstance(values, Tensor) or values.shape != whole[place].shape or values.dtype != dtype:
                raise ValueError(f"'{name[:100]}' has values of another shape or dtype than its metadata")
            whole[place] = values
        if sum(math.prod(chunk.sizes) for chunk in kept.chunks) != whole.numel():
            raise ValueError(f"'{name[:100]}' has values for only a part of its shape")
        parts.tensors[own] = whole
    return parts_of(state_of(parts))  # options that are tensors become items


def _loaded(source: Path, place: Any) -> Any:
    """What ``torch.save`` wrote: tensors and plain data alone."""
    if Path(place.relative_path).name != place.relative_path:
        raise ValueError("its metadata names a file outside of its folder")
    with (source / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


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
