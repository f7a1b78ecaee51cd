"""Functions that numba compiles when they are first called, with their machine code on disk.

numba, which takes most of a second to import, is imported by the first call. Machine code is found in two places: where
numba caches it, next to the sources or in the user's cache folder; and next to the sources in a wheel, compiled ahead
for any CPU of the architecture (`setup.py`). It belongs to one content of the sources and one version of numba.

If no cache folder can be written, as in a container with an installation by another user and no home, what the wheel
lacks is compiled in each process. Each function is cached as soon as it is compiled: a process that is ended in between
loses only the one it compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache, update_wrapper
from hashlib import sha256
from pathlib import Path
from threading import RLock
from types import CodeType
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

_lock = RLock()
_interpreting = False


def njit(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, …)``, without the cache if numba finds no folder for it."""

    def made(function: F) -> F:
        return cast(F, _Function(function, options))

    return made


class _Function:
    """A function that is compiled when it is called, except within :func:`interpreted`.

    The last two attributes are those by which numba finds functions that compiled code calls.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self.py_func, self.targetoptions = function, options
        self._compiled: Any = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        return (self.py_func if _interpreting else self.compiled)(*args, **named)

    @property
    def compiled(self) -> Any:
        """numba's function."""
        if self._compiled is None:
            with _lock:
                self._compiled = self._compiled or _cached(self.py_func, self.targetoptions)
        return self._compiled

    @property
    def signatures(self) -> Any:
        """The types of arguments for which it is compiled in this process."""
        return () if self._compiled is None else self._compiled.signatures

    @property
    def _numba_type_(self) -> Any:
        return self.compiled._numba_type_


def _cached(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    import numba

    _announce_compilation()
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return numba.njit(**options)(function)
    if (file := _index_file(compiled)) is not None:
        _find_machine_code(file, Path(function.__code__.co_filename), _stamp(function))
    return compiled


def _stamp(function: Callable[..., Any]) -> bytes:
    """A hash of the file of a function, and of those of all compiled functions that it calls, which numba ignores."""
    called, files, left = {function: None}, set[str](), [function]
    while left:
        each = left.pop()
        files.add(each.__code__.co_filename)
        codes = [each.__code__, *(c for c in each.__code__.co_consts if isinstance(c, CodeType))]
        values = (each.__globals__.get(name) for code in codes for name in code.co_names)
        new = {value.py_func: None for value in values if isinstance(value, _Function) and value.py_func not in called}
        called |= new
        left += new
    return sha256(b"".join(Path(name).read_bytes() for name in sorted(files))).digest()


def _find_machine_code(file: Any, source: Path, stamp: bytes) -> None:
    """Look for machine code in numba's folder, and next to the source.

    An index is a pickle that names the classes of argument types. numba reads it before it compares the sources, so
    after a class is renamed, or if the file is truncated, reading it would raise.
    """
    file._source_stamp = stamp
    ahead = copy(file)
    ahead._cache_path = str(source.parent / "__pycache__")
    ahead._index_path = str(source.parent / "__pycache__" / file._index_name)
    for each in (file, ahead):
        each._load_index = _tolerant(each._load_index)
    load = file.load

    def load_either(key: Any) -> Any:
        found = load(key)
        if found is None:
            types, (platform, *_), code = key
            found = ahead.load((types, (platform, *ANY_CPU), code))
        return found

    file.load, file.ahead = load_either, ahead


ANY_CPU = "generic", ""
"""The CPU, and its further instructions, for which wheels are compiled: ``NUMBA_CPU_NAME`` of `setup.py`."""


def _tolerant(load: Callable[[], Any]) -> Callable[[], Any]:
    def load_index() -> Any:
        try:
            return load()
        except OSError:
            raise
        except Exception:  # whatever unpickling raises
            return {}

    return load_index


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


@cache
def _announce_compilation() -> None:
    """From now on, announce that a function of panpipe is compiled: it is neither in memory nor on disk."""
    from numba.core import event

    class Announcer(event.Listener):
        def on_start(self, event: Any) -> None:
            function = getattr(event.data.get("dispatcher"), "py_func", None)
            if getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
                announce()

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]


def _index_file(function: Any) -> Any:
    """numba's file with the index of a function's machine code; None if this numba has none (0.59 to 0.68 have one)."""
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    return file if hasattr(file, "_load_index") else None


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether a function of :func:`njit` is compiled, in this process or on disk for its present source.

    Also True if numba has no cache folder, or is a version whose index cannot be read: compiling ahead is then
    impossible.
    """
    assert isinstance(function, _Function)
    file = _index_file(function.compiled)
    if function.signatures or file is None:
        return True
    try:
        ahead = any(tuple(cpu) == ANY_CPU for _, (_, *cpu), _ in file.ahead._load_index())
        return ahead or bool(file._load_index())
    except OSError:
        return True


COMPILING = "compiling the search, once after an editable installation: about 50 s of processor time"
"""The message of `compile_notice`."""

Report = Callable[[str], object]
_waiting: list[Report] = []


@contextmanager
def compile_notice(report: Report) -> Iterator[None]:
    """Call ``report`` with a line before the first function that is compiled within this context."""
    _waiting.append(report)
    try:
        yield
    finally:
        if report in _waiting:
            _waiting.remove(report)


def announce() -> None:
    """Call every waiting report once; equal ones are one."""
    waiting = dict.fromkeys(_waiting)
    _waiting.clear()
    for report in waiting:
        report(COMPILING)
