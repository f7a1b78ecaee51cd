"""What objects of the standard library hold: context variables, shared numbers, read-only views, weak references.

A step that reads one of them reads the value that it holds, which may change between steps as an attribute does. Their
own attributes are not named in the user's code, so each class has a function here that reads the value.
"""

import configparser
import contextvars
import ctypes
import functools
import gc
import hashlib
import io
import logging
import mmap
import multiprocessing.shared_memory
import queue
import threading
import types
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any
from zlib import crc32

from attrs import frozen
from torch import Tensor

ATTRIBUTES = (types.SimpleNamespace, Namespace, threading.local)
"""Classes whose instances have attributes of the user's."""


@frozen
class Held:
    """A value that an object holds.

    Args:
        name: of the value for messages, such as ".data".
        read: reads it again.
        attribute: by which it can be assigned; None if it cannot.
    """

    name: str
    read: Callable[[], Any]
    attribute: str | None = None


def held_by(value: Any) -> Held | None:
    """The value that an object of the standard library holds; None for objects that are compared by identity."""
    kind = type(value)  # `isinstance` asks a weak proxy for the class of its object
    for classes, name, read in _READ:
        if issubclass(kind, classes):
            return Held(name, functools.partial(read, value))
    if issubclass(kind, ctypes._SimpleCData) and not issubclass(kind, ctypes.c_void_p | ctypes.py_object):
        return Held(".value", lambda: value.value, "value")
    if issubclass(kind, ctypes.Array | ctypes.Structure):
        return Held("'s bytes", lambda: crc32(bytes(value)))
    return None


def _referred(value: weakref.ReferenceType[Any]) -> Any:
    """The object of a weak reference; None for a tensor, as recurrent layers refer to their parameters."""
    found = value()
    return None if isinstance(found, Tensor) else found


def _bytes_of(value: Any) -> int | None:
    """32 bits over the bytes of a view or a mapped file; None if it is closed."""
    try:
        return crc32(value.tobytes() if isinstance(value, memoryview) else value)
    except ValueError:
        return None


def _text(value: io.StringIO | io.BytesIO) -> Any:
    return None if value.closed else value.getvalue()


_READ: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (contextvars.ContextVar, ".get()", lambda value: value.get(None)),
    ((UserDict, UserList, UserString, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet), ".data",
     lambda value: value.data),
    (ChainMap, ".maps", lambda value: value.maps),
    (types.MappingProxyType, "'s dict", lambda value: gc.get_referents(value)[0]),
    (weakref.ReferenceType, "()", _referred),
    ((weakref.ProxyType, weakref.CallableProxyType), "'s object", lambda value: value.__repr__.__self__),
    (SynchronizedBase, ".get_obj()", lambda value: value.get_obj()),
    (threading.Event, ".is_set()", threading.Event.is_set),
    (queue.Queue, ".queue", lambda value: value.queue),
    (configparser.SectionProxy, ".parser", lambda value: value.parser),
    (configparser.RawConfigParser, "._sections", lambda value: value._sections),
    ((io.StringIO, io.BytesIO), ".getvalue()", _text),
    ((memoryview, mmap.mmap), "'s bytes", _bytes_of),
    ((type(hashlib.sha256()), type(hashlib.blake2b()), type(hashlib.blake2s())), ".digest()",
     lambda value: value.digest()),
    (multiprocessing.shared_memory.ShareableList, "'s items", lambda value: repr(list(value))),
    (type(threading.Lock()), ".locked()", lambda value: value.locked()),
    (logging.Logger, ".getEffectiveLevel()", logging.Logger.getEffectiveLevel),
)  # fmt: skip
"""Classes, the name of what their instances hold, and a function that reads it."""
