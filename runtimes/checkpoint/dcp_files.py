"""Conversion to and from checkpoints of ``torch.distributed.checkpoint`` (DCP).

DCP's metadata is a pickle, and its values are files of ``torch.save``, with pickles inside. `plain_pickles` reads both
as plain data.
"""

import io
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from ...core.errors import PanpipeError, RequestError, in_a_line
from ...core.files.limits import short
from ...core.files.read import file_below, open_regular, read_bytes
from ..launch.exchange import OneProcess
from .durable_files import cannot_write
from .manifest import DCP_METADATA
from .plain_pickles import Names, PlainUnpickler, saved_value, size_of
from .reading import CheckpointReader
from .state_parts import Parts, parts_of, state_of
from .writing import Save, begin_save

ROOT = "pipe"
"""The name of a pipeline in DCP's checkpoints: ``dcp.save({"pipe": pipe}, …)`` writes the same."""

_MOST_METADATA = 1 << 30
"""Most bytes of DCP's metadata."""
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


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("the name of a layout in it is not a string")
    return name


_VALUES: Names = {
    ("torch", "Size"): size_of,
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


def _metadata(data: bytes) -> Any:
    """The metadata in a pickle, as records."""
    # Classes of this file alone: a pickle can set attributes of classes.
    records = {(module, name): type(name, (_Record,), {}) for module, name in _CLASSES}
    return PlainUnpickler(io.BytesIO(data), {**_VALUES, **records}).load()


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
    Save(folder, begin_save(folder), parts, steps, None, 1).run(OneProcess())


def _parts_in(source: Path) -> Parts:
    found = _metadata(read_bytes(source / DCP_METADATA, _MOST_METADATA))
    places = {(index.fqn, vars(index).get("offset")): place for index, place in found.storage_data.items()}
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


def _whole(name: str, kept: Any, places: Mapping[Any, Any], files: "_Files") -> Tensor:
    """A tensor of its chunks, which must cover it without overlapping."""
    dtype, size = kept.properties.arguments[0], size_of(kept.size)
    if math.prod(size) * dtype.itemsize > files.most_bytes:
        raise ValueError(f"{short(name)} has a shape of more bytes than the files have")
    whole, written = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
    for chunk in kept.chunks:
        values = files.value(places[name, tuple(chunk.offsets)])
        place = tuple(
            slice(at, at + size) for at, size in zip(size_of(chunk.offsets), size_of(chunk.sizes), strict=True)
        )
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
            return saved_value(file.read(length))


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
