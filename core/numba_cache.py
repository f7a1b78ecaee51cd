"""Functions compiled by numba, with their machine code cached on disk if there is a folder for it.

numba caches it next to the sources or in the user's cache folder. If neither is writable, as in a container with an
installation by another user and no home, numba raises an error; such a function is then compiled in each process.

Each function is cached as soon as it is compiled: a process that is ended in between loses only the one it compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numba.core.registry import CPUDispatcher

from .compile_notice import announce

F = TypeVar("F", bound=Callable[..., Any])


class _Announcer(event.Listener):
    """Announces that a function of panpipe is compiled: it is neither in memory nor on disk."""

    def on_start(self, event: Any) -> None:
        function = getattr(event.data.get("dispatcher"), "py_func", None)
        if getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
            announce()

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]


def njit(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, …)``, without the cache if numba finds no folder for it.

    Args:
        options: of ``numba.njit``.
    """

    def decorate(function: F) -> F:
        compiled: Any
        try:
            compiled = numba.njit(cache=True, **options)(function)
            _ignore_unreadable_index(compiled)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            compiled = numba.njit(**options)(function)
        if isinstance(compiled, CPUDispatcher):  # not with NUMBA_DISABLE_JIT
            compiled.__class__ = _Function
        return cast(F, compiled)

    return decorate


_interpreting = False


class _Function(CPUDispatcher):
    """A function that is compiled when it is called, except within :func:`interpreted`."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.py_func(*args, **named) if _interpreting else super().__call__(*args, **named)


def is_interpreted() -> bool:
    """Whether :func:`interpreted` is in effect."""
    return _interpreting


@contextmanager
def interpreted() -> Iterator[None]:
    """Within this context functions of :func:`njit` run in Python, a hundred times as slowly, with the same results.

    For a few calls, which take less time than compiling. Schedules are not polished, which takes thousands. Functions
    seed numpy's generator, which is put back.
    """
    global _interpreting  # noqa: PLW0603
    state, before = np.random.get_state(), _interpreting
    _interpreting = True
    try:
        yield
    finally:
        _interpreting = before
        np.random.set_state(state)


def _ignore_unreadable_index(function: Callable[..., Any]) -> None:
    """Compile a function again if the index of its machine code cannot be read.

    The index is a pickle that names the classes of argument types. numba reads it before it compares the sources' age,
    so after a class is renamed, or if the file is truncated, the first call would raise.
    """
    file = _index_file(function)
    if file is None:
        return
    load = file._load_index

    def tolerant() -> Any:
        try:
            return load()
        except OSError:
            raise
        except Exception:  # whatever unpickling raises
            return {}

    file._load_index = tolerant


def _index_file(function: Callable[..., Any]) -> Any:
    """numba's file with the index of a function's machine code; None if this numba has none (0.59 to 0.63 have one)."""
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    return file if hasattr(file, "_load_index") else None


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether a function of :func:`njit` is compiled, in this process or on disk for its present source.

    Also True if numba has no cache folder, or is a version whose index cannot be read: compiling ahead is then
    impossible.
    """
    file = _index_file(function)
    if getattr(function, "signatures", None) or file is None:
        return True
    try:
        return bool(file._load_index())
    except OSError:
        return True
