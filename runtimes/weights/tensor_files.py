"""One safetensors file, read and written a piece of a tensor at a time.

The format is a length, a header in JSON, and the tensors' bytes. The safetensors library maps the whole file, private
and writable, which Linux counts in full against a process's limit on data: a file above the limit cannot be opened.
This module has at most a header and one piece in memory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import RequestError
from ...core.files.json_reader import parse_json
from ...core.files.limits import Limits
from ...core.files.read import open_regular
from ...core.files.write import replace_file
from ..flat_bytes import flat_bytes
from ..watch.activity import HERE

_PIECE_BYTES = 8 << 20
HEADER = Limits(size=100_000_000, depth=4, text=100_000_000, printable=False)
"""Limits of a header; its metadata may be any text. 100 MB is the format's own limit: a longer header is damaged."""
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


@frozen
class Entry:
    """A tensor's location in a file.

    Args:
        dtype: the format's name of the dtype.
        shape: of the tensor.
        start, end: of its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A safetensors file, open for reading by name. Only its header is in memory.

    Args:
        path: the file.

    Attributes:
        path: the file.
        entries: name → the tensor's location.

    Raises:
        RequestError: it cannot be read, is of another kind, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self.entries = _entries(path, file)
        except OSError as error:
            raise RequestError(f"cannot read '{path}': {error.strerror}; give a safetensors file") from None

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
                    raise RequestError(_truncated(self.path, file.tell(), entry.end))
                target[first : first + len(part)].copy_(part)


def _entries(path: Path, file: BinaryIO) -> dict[str, Entry]:
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    if head.startswith((b"PK\3\4", b"\x80\2")):
        name = path.with_suffix(".safetensors").name
        raise RequestError(
            f"'{path}' was written by torch.save, and weights= reads safetensors, which hold data alone: load it into "
            f"the model before, model.load_state_dict(torch.load('{path}', weights_only=True)), or convert it once, "
            f"safetensors.torch.save_file(torch.load('{path}', weights_only=True), '{name}'); if the file has more "
            "than the weights, select them, such as torch.load(…)['model'] or torch.load(…)['state_dict']"
        )
    length = int.from_bytes(head, "little")
    other = (
        f"'{path}' is not a safetensors file, or its beginning is damaged: "
        "write one with safetensors.torch.save_file, or copy it again"
    )
    if size < 8 or length > HEADER.size:
        raise RequestError(other)
    if 8 + length > size:
        raise RequestError(_truncated(path, size, 8 + length))
    try:
        text = file.read(length).decode()
        header = parse_json(text, f"the header of '{path}'", HEADER)
        found = {name: _entry(name, spec, 8 + length) for name, spec in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RequestError):
        raise RequestError(other) from None
    for name, entry in found.items():
        if entry.end > size:
            raise RequestError(_truncated(path, size, max(e.end for e in found.values())))
        known = DTYPES.get(entry.dtype)
        inside = 8 + length <= entry.start <= entry.end and min(entry.shape, default=0) >= 0
        if not inside or (known is not None and entry.end - entry.start != prod(entry.shape) * known.itemsize):
            raise RequestError(
                f"'{path}' gives '{name}' {entry.end - entry.start} bytes for {entry.dtype} of shape "
                f"{entry.shape}: the header is damaged; copy the file again"
            )
    _check_apart(path, found)
    return found


def _entry(name: str, spec: Mapping[str, Any], data: int) -> Entry:
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise ValueError("a tensor's name is too long, or cannot be printed")
    dtype, shape, (start, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
    whole = all(type(number) is int for number in (*shape, start, end))
    named = isinstance(dtype, str) and len(dtype) <= 32 and dtype.isprintable()
    if not (whole and named and len(shape) <= _MOST_DIMENSIONS):
        raise ValueError("its dtype, shape or offsets are wrong")
    return Entry(dtype, tuple(shape), data + start, data + end)


def _check_apart(path: Path, entries: Mapping[str, Entry]) -> None:
    """Refuse tensors that share bytes: the format has none."""
    order = sorted((entry.start, entry.end, name) for name, entry in entries.items() if entry.end > entry.start)
    for (_, end, name), (start, _, other) in pairwise(order):
        if start < end:
            raise RequestError(
                f"'{path}' has '{name}' and '{other}' at the same bytes: the header is damaged; copy the file again"
            )


def _truncated(path: Path, size: int, wanted: int) -> str:
    return f"'{path}' is truncated: it has {size} bytes and its header needs {wanted}; copy it again"


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
