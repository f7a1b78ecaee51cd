"""Reading pickles of unknown origin as plain data: DCP's metadata, and files of ``torch.save``.

No class that a pickle names is created and no function is called, except for those listed here. The result is bounded
by the size of the file: a few bytes of a pickle may name one object many times, a compressed file may be much larger
than its bytes, and a tensor with steps of 0 has more values than its storage.
"""

import io
import math
import operator
import pickle
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

import torch
from attrs import frozen
from torch import Tensor

_MOST_IN_TUPLE = 4096
"""Most values of a tuple, with those of tuples inside: a key of a dict, whose hash visits all of them."""
_MOST_DIMENSIONS = 64
_DEEPEST = 100
"""Most nested lists, tuples and dicts of a saved value."""
_FEW_VALUES = 1_000_000
"""This many values a saved value may have in any case; a larger file may have one for each of its bytes."""

Names = Mapping[tuple[str, str], Any]
"""Module and name in a pickle → what is used in its place."""


class PlainUnpickler(pickle._Unpickler):
    """Builds plain data alone, whatever a pickle says.

    It is Python's unpickler in Python: the one in C allocates a table as large as a number in the pickle. Tuples of
    tuples are bounded, because a few bytes make one whose hash takes forever, and there are no frozen sets, which have
    the same problem. Integers have at most 255 bytes.

    Args:
        file: with the pickle.
        names: what it may name; dtypes of torch, too.
    """

    stack: list[Any]

    def __init__(self, file: BinaryIO, names: Names) -> None:
        super().__init__(file)
        self._names = names
        self._tuples: dict[int, tuple[tuple[Any, ...], int]] = {}  # the tuple keeps its id

    def _load_tuple(self, code: int) -> None:
        load: Any = pickle._Unpickler.dispatch[code]
        load(self)
        made = self.stack[-1]
        size = 1 + sum(self._tuples[id(each)][1] if id(each) in self._tuples else 1 for each in made)
        if size > _MOST_IN_TUPLE:
            raise pickle.UnpicklingError(f"it has a tuple of more than {_MOST_IN_TUPLE} values")
        self._tuples[id(made)] = made, size

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has a frozen set, or an integer of more than 255 bytes")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **{
            code[0]: lambda self, code=code[0]: self._load_tuple(code)
            for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
        },
        pickle.FROZENSET[0]: _refuse,
        pickle.LONG4[0]: _refuse,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module[:100]}.{name[:100]}, which is not plain data")


def size_of(values: Any) -> tuple[int, ...]:
    """The shape in a ``torch.Size``.

    Raises:
        ValueError: it is none.
    """
    found = tuple(operator.index(value) for value in values)
    if len(found) > _MOST_DIMENSIONS or not all(0 <= size < 1 << 63 for size in found):
        raise ValueError("it has a shape of too many dimensions, or with sizes that are negative or beyond 2⁶³")
    return found


def saved_value(data: bytes) -> Any:
    """The tensor or plain data in a file of ``torch.save``; tensors are on the CPU.

    Args:
        data: of the file.

    Raises:
        Exception: it is no such file, is compressed, or has anything else; of any class.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it has a compressed file, and torch.save writes none")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("it has files that share bytes")
        (pickled,) = (entry.filename for entry in entries if entry.filename.count("/") == 1 and _is_pickle(entry))
        reader = _Storages(archive, pickled.removesuffix("data.pkl"))
        value = _ValueUnpickler(io.BytesIO(archive.read(pickled)), reader).load()
    _check_size(value, max(len(data), _FEW_VALUES))
    return value


def _is_pickle(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith("/data.pkl")


@frozen
class _Storage:
    """The bytes of a tensor, and the dtype that they have if the tensor names none."""

    bytes: Tensor
    dtype: torch.dtype


class _Storages:
    """The storages of an archive, each of which is read once.

    Args:
        archive: of ``torch.save``.
        root: the beginning of the names of its files.
    """

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive, self._root = archive, root
        self._found: dict[str, Tensor] = {}
        order = f"{root}byteorder"
        if order in archive.namelist() and archive.read(order).decode() != sys.byteorder:
            raise ValueError("it was written on a machine with another byte order")

    def find(self, key: str, dtype: torch.dtype) -> _Storage:
        """The storage with a key."""
        if key not in self._found:
            data = bytearray(self._archive.read(f"{self._root}data/{key}"))
            self._found[key] = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return _Storage(self._found[key], dtype)


class _ValueUnpickler(PlainUnpickler):
    def __init__(self, file: BinaryIO, storages: _Storages) -> None:
        super().__init__(file, _SAVED)
        self._storages = storages

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("it names a storage that is none")
        return self._storages.find(key, dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, marks: Any = None) -> Tensor:
    return _typed_tensor(storage, offset, size, stride, _grad, _hooks, storage.dtype, marks)


def _typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, marks: Any = None
) -> Tensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("it has a tensor without a storage or a dtype")
    shape, steps = size_of(size), size_of(stride)
    count = storage.bytes.numel() // dtype.itemsize
    if math.prod(shape) > count:
        raise ValueError("it has a tensor with more values than it stores")
    made = storage.bytes[: count * dtype.itemsize].view(dtype).as_strided(shape, steps, operator.index(offset))
    marked = {} if marks is None else marks
    if marked.get("conj"):
        made = made.conj()
    return made._neg_view() if marked.get("neg") else made


def _encoded(text: Any, encoding: Any) -> bytes:
    """Bytes, which protocol 2 of pickles writes as text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it has bytes that are none")
    return text.encode("latin-1")


def _device(*given: Any) -> torch.device:
    return torch.device(*given)


def _plain(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """The constructor of a container, which is a class: a pickle could set its attributes."""
    return lambda values=(): kind(values)


_DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip
_SAVED: Names = {
    **{("torch", f"{name}Storage"): dtype for name, dtype in _DTYPES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, _grad, _hooks: tensor,
    ("torch", "Size"): size_of,
    ("torch", "device"): _device,
    ("collections", "OrderedDict"): _plain(dict),
    ("collections", "Counter"): _plain(Counter),
    ("__builtin__", "set"): _plain(set),
    ("_codecs", "encode"): _encoded,
}


def _check_size(value: Any, most: int) -> None:
    """Refuse a value of many parts or bytes; a part counts as often as it is named."""
    level, count = [value], 0
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                count += 2 * len(each)
            elif isinstance(each, list | tuple | set):
                count += len(each)
            elif isinstance(each, Tensor):
                count += each.numel() * each.dtype.itemsize
            if count > most:
                raise ValueError("it has more values than its file has bytes")
            if isinstance(each, Mapping):
                below += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple | set):
                below += each
        level = below
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
