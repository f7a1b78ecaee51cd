"""Values as JSON bytes and back: what ranks send each other, and the items of a checkpoint.

Decoding runs no code of the sender, as unpickling would. JSON has numbers, strings, booleans and null, and a dict whose
keys are strings is a JSON object. Every other value is a list that starts with its tag::

    (1, inf)                   ["tuple", 1, ["float", "inf"]]
    {0: b"a"}                  ["dict", [0, ["bytes", "YQ=="]]]
    Mesh(2)                    ["object", "core.cluster.mesh:Mesh", [2, 1, null, 1, null, 1, 1]]

Objects are instances of attrs classes and of enumerations: those of ``core``, and those that `exchanged` marks. They
are built by their constructors, with their validators. The items of a checkpoint have none: see ``objects``.
"""

import base64
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from .actions import Kind

T = TypeVar("T")

_PACKAGE = __package__.removesuffix("core").removesuffix(".")
_MARKED: dict[str, type] = {}


def exchanged(cls: type[T]) -> type[T]:
    """Mark an attrs class or an enumeration outside ``core`` as one whose instances ranks send each other."""
    _MARKED[_name(cls)] = cls
    return cls


def encode(value: Any, *, objects: bool = True) -> bytes:
    """A value as JSON bytes; the same bytes for equal values.

    Args:
        value: None, booleans, numbers, strings, bytes, lists, tuples, sets, dicts, tensors, dtypes, devices, and
            objects, in any nesting.
        objects: whether objects are allowed.

    Raises:
        TypeError: a value of another type; the message has its path and type.
    """
    return json.dumps(_packed(value, "", objects), separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes | bytearray | str, *, objects: bool = True) -> Any:
    """The value of `encode`; tensors are on the CPU.

    Raises:
        ValueError: the bytes are not such a value.
    """
    try:
        return _unpacked(json.loads(data), objects)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # the constructor of an object refused its values
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _packed(value: Any, path: str, objects: bool) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _packed(below, f"{path}.{key}", objects) for key, below in value.items()}
    for tag, (matches, pack, _) in _KINDS.items():
        if matches(value):
            return [tag, *pack(value, path, objects)]
    if objects and _is_exchanged(kind):
        return ["object", _name(kind), _fields(value, path)]
    raise TypeError(
        f"{path.removeprefix('.') or 'it'} is of type {kind.__qualname__}: only numbers, strings, lists, tuples, dicts "
        f"and tensors can be written{' or sent' if objects else ''} as plain data"
    )


def _fields(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return value.name
    kind: Any = type(value)
    return [_packed(getattr(value, field.name), f"{path}.{field.name}", True) for field in _init_fields(kind)]


@cache
def _init_fields(kind: Any) -> tuple[Any, ...]:
    return tuple(field for field in attrs.fields(kind) if field.init)


def _unpacked(value: Any, objects: bool) -> Any:
    if isinstance(value, dict):
        return {key: _unpacked(below, objects) for key, below in value.items()}
    if not isinstance(value, list):
        return value
    if not value or not isinstance(value[0], str):
        raise ValueError("a list without a tag")
    tag, *given = value
    if tag == "object" and objects:
        return _object(*given)
    if tag not in _KINDS:
        raise ValueError(f"unknown tag {tag[:40]!r}")
    return _KINDS[tag][2]([_unpacked(each, objects) for each in given] if tag in _CONTAINERS else given, objects)


def _object(name: str, given: Any) -> Any:
    cls: Any = _class(name)
    if issubclass(cls, Enum):
        return cls[given]
    fields = _init_fields(cls)
    if len(fields) != len(given):
        raise ValueError(f"{name} has {len(fields)} fields, not {len(given)}: all ranks must run the same version")
    return cls(**{field.alias: _unpacked(each, True) for field, each in zip(fields, given, strict=True)})


def _name(cls: type) -> str:
    return f"{cls.__module__.removeprefix(f'{_PACKAGE}.')}:{cls.__qualname__}"


def _is_exchanged(cls: type) -> bool:
    name = _name(cls)
    return name in _MARKED or (name.startswith("core.") and (attrs.has(cls) or issubclass(cls, Enum)))


@cache
def _class(name: str) -> type:
    """The class of a name; only ones that `_is_exchanged`."""
    module, _, qualified = name.partition(":")
    if name in _MARKED:
        return _MARKED[name]
    if not module.startswith("core.") or not qualified.isidentifier():
        raise ValueError(f"no class '{name[:100]}' is exchanged")
    where = f"{_PACKAGE}.{module}"
    found = getattr(sys.modules.get(where) or import_module(where), qualified, None)
    if not isinstance(found, type) or _name(found) != name or not _is_exchanged(found):
        raise ValueError(f"no class '{name[:100]}' is exchanged")
    return found


def _each(value: Any, path: str, objects: bool) -> list[Any]:
    return [_packed(each, f"{path}[{i}]", objects) for i, each in enumerate(value)]


def _pairs(value: Mapping[Any, Any], path: str, objects: bool) -> list[Any]:
    return [
        ["list", _packed(key, path, objects), _packed(below, f"{path}[{key!r}]", objects)]
        for key, below in value.items()
    ]


def _tensor(value: Tensor, path: str, objects: bool) -> list[Any]:
    if value.is_meta or value.is_sparse or value.is_quantized:
        raise TypeError(f"{path.removeprefix('.') or 'it'} is a tensor without plain values: move it to the CPU")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), _text(flat.numpy().tobytes())]


def _tensor_of(given: list[Any], _: bool) -> Tensor:
    name, shape, text = given
    dtype, data = _dtype(name), bytearray(base64.b64decode(text, validate=True))
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of shape {str(shape)[:100]} and {dtype} with {len(data)} bytes")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).clone()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {str(name)[:40]!r}")
    return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_Pack = Callable[[Any, str, bool], list[Any]]
_Unpack = Callable[[list[Any], bool], Any]
_KINDS: dict[str, tuple[Callable[[Any], bool], _Pack, _Unpack]] = {
    "list": (lambda v: type(v) is list, _each, lambda g, _: g),
    "tuple": (lambda v: type(v) in (tuple, torch.Size), _each, lambda g, _: tuple(g)),
    "counter": (lambda v: type(v) is Counter, _pairs, lambda g, _: Counter(dict(g))),
    "ordered": (lambda v: type(v) is OrderedDict, _pairs, lambda g, _: OrderedDict(g)),
    "dict": (lambda v: type(v) in (dict, MappingProxyType), _pairs, lambda g, _: dict(g)),
    "set": (lambda v: type(v) is set, lambda v, p, o: _each(sorted(v, key=repr), p, o), lambda g, _: set(g)),
    "frozenset": (
        lambda v: type(v) is frozenset, lambda v, p, o: _each(sorted(v, key=repr), p, o), lambda g, _: frozenset(g)
    ),
    "float": (lambda v: type(v) is float, lambda v, p, o: [repr(v)], lambda g, _: float(g[0])),
    "number": (lambda v: isinstance(v, np.generic), lambda v, p, o: [_packed(v.item(), p, o)], lambda g, _: g[0]),
    "bytes": (
        lambda v: type(v) is bytes, lambda v, p, o: [_text(v)], lambda g, _: base64.b64decode(g[0], validate=True)
    ),
    "kind": (lambda v: type(v) is Kind, lambda v, p, o: [v.value], lambda g, _: Kind(g[0])),
    "tensor": (lambda v: isinstance(v, Tensor), _tensor, _tensor_of),
    "dtype": (
        lambda v: isinstance(v, torch.dtype),
        lambda v, p, o: [str(v).removeprefix("torch.")],
        lambda g, _: _dtype(g[0]),
    ),
    "path": (lambda v: isinstance(v, PurePath), lambda v, p, o: [str(v)], lambda g, _: Path(g[0])),
    "device": (lambda v: isinstance(v, torch.device), lambda v, p, o: [str(v)], lambda g, _: torch.device(g[0])),
}  # fmt: skip
"""Tag → whether a value is of this kind, its parts as JSON, and the value of the parts."""
_CONTAINERS = frozenset({"list", "tuple", "counter", "ordered", "dict", "set", "frozenset", "number"})
