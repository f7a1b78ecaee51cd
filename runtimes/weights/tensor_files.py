"""One safetensors file, read and written a piece of a tensor at a time.

The safetensors library reads the header and checks all of it; the values are read here. To read them, the library maps
the file a second time, private and writable (0.8.0, `safe_open` of a file of 1 GiB): with a limit on data (``ulimit
-d``) below the file's size, or on addresses (``ulimit -v``) below twice that, it cannot be opened, and a file that is
cut off meanwhile ends the process by SIGBUS. This module has at most one piece in memory, and needs addresses for the
file once.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import RequestError, in_a_line
from ...core.files.read import open_regular
from ...core.files.write import replace_file
from ..flat_bytes import flat_bytes
from ..watch.activity import HERE

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


@frozen
class Entry:
    """A tensor's location in a file.

    Args:
        dtype: the format's name of the dtype.
        shape: of the tensor.
        start: of its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A safetensors file, open for reading by name. Only its header is in memory.

    Args:
        path: the file.

    Attributes:
        path: the file.
        entries: name → the tensor's location, in the order of the file.

    Raises:
        RequestError: it cannot be read, is of another kind, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:  # the library would wait for the writer of a pipe
            size, head = os.fstat(file.fileno()).st_size, file.read(8)
        if head.startswith((b"PK\3\4", b"\x80\2")):
            raise _written_by_torch_save(path)
        try:
            self.entries = _entries(path, 8 + int.from_bytes(head, "little"), size)
        except (SafetensorError, OSError, MemoryError, ValueError) as error:
            reason = "ulimit -v is below its size" if isinstance(error, MemoryError) else in_a_line(error)[:300]
            raise RequestError(
                f"'{path}', of {size} bytes, is not a whole safetensors file ({reason}): copy it again, or write one "
                "with safetensors.torch.save_file"
            ) from None

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Overwrite a tensor of the same shape; floating numbers are converted to its dtype.

        Args:
            name: one of ``entries``.
            tensor: on any device.
        """
        entry = self.entries[name]
        if not tensor.is_contiguous():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.read_into(name, whole)
            tensor.copy_(whole)
            return
        target, dtype = tensor.reshape(-1), DTYPES[entry.dtype]
        piece = torch.empty(min(_PIECE_BYTES // dtype.itemsize, target.numel()), dtype=dtype)
        with open_regular(self.path) as file:
            file.seek(entry.start)
            for first in range(0, target.numel(), max(len(piece), 1)):
                HERE.doing(f"reading '{name}'")
                part = piece[: target.numel() - first]
                if file.readinto(_bytes(flat_bytes(part))) != part.nbytes:
                    raise RequestError(f"'{self.path}' is truncated since it was opened: copy it again")
                target[first : first + len(part)].copy_(part)


def _entries(path: Path, start: int, size: int) -> dict[str, Entry]:
    """The entries of a file; ``start`` is where the values begin, which are in order and without gaps."""
    found = {}
    with safe_open(path, framework="numpy") as file:  # that of torch maps the file a second time
        for name in file.offset_keys():
            kept = file.get_slice(name)
            entry = found[name] = Entry(kept.get_dtype(), tuple(kept.get_shape()), start)
            if len(name) > _LONGEST_NAME or not name.isprintable() or len(entry.shape) > _MOST_DIMENSIONS:
                raise ValueError("a tensor's name is too long or cannot be printed, or it has too many dimensions")
            start += prod(entry.shape) * _BITS.get(entry.dtype, 8) // 8
    if start != size:
        raise ValueError("it has a dtype of an unknown size")
    return found


def _written_by_torch_save(path: Path) -> RequestError:
    name = path.with_suffix(".safetensors").name
    return RequestError(
        f"'{path}' was written by torch.save, and Run(weights=) reads safetensors, which hold data alone: load it into "
        f"the model before, model.load_state_dict(torch.load('{path}', weights_only=True)), or convert it once, "
        f"safetensors.torch.save_file(torch.load('{path}', weights_only=True), '{name}'); if the file has more "
        "than the weights, select them, such as torch.load(…)['model'] or torch.load(…)['state_dict']"
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a safetensors file, under a temporary name until it is complete.

    Args:
        path: of the file; an existing one is replaced.
        tensors: by name; on any device.

    Returns:
        Bytes of the tensors.

    Raises:
        RequestError: the format has no name for a dtype, or the file cannot be written.
    """
    write_whole(path, [file_head(tensors)], file_pieces(tensors))
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def file_head(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file before the values of its tensors.

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
    return len(text).to_bytes(8, "little") + text


def file_pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The values of tensors in the order of their file, in pieces of some MB."""
    return (piece for tensor in tensors.values() for piece in _pieces(tensor))


def write_whole(path: Path, head: Iterable[bytes], rest: Iterable[memoryview] = ()) -> None:
    """Write a file under a temporary name in the same folder, then rename it, so that no reader sees a part of it.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        replace_file(path, chain(head, rest), durable=True)
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give another folder") from None


def _pieces(tensor: Tensor) -> Iterable[memoryview]:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = _PIECE_BYTES // tensor.dtype.itemsize
    for first in range(0, flat.numel(), step):
        yield _bytes(flat_bytes(flat[first : first + step].cpu()))


def _bytes(flat: Tensor) -> memoryview:
    """The memory of uint8 on the host; NumPy does not have all dtypes of other tensors."""
    view: memoryview = flat.numpy().data
    return view
