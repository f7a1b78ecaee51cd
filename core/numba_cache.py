"""Functions compiled by numba, whose machine code is kept on disk where there is a folder for it.

numba keeps it next to the sources, else in the user's cache. Where neither can be written, as in a container with an
installation of somebody else's and no home, it refuses to make such a function at all; it is then compiled in each
process anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, …)``, without the cache where numba finds no folder for it.

    Args:
        options: of ``numba.njit``.
    """

    def decorate(function: F) -> F:
        try:
            compiled: F = numba.njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return cast(F, numba.njit(**options)(function))
        _ignore_unreadable_index(compiled)
        return compiled

    return decorate


def _ignore_unreadable_index(function: Callable[..., Any]) -> None:
    """Have a function compiled again where the index of its machine code cannot be read.

    The index is a pickle that names classes of argument types. numba reads it before it compares the sources' age, so a
    class that was renamed since, or a file that was cut off, would end in an error at the first call.
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
    """numba's file with the index of a function's machine code; None where this numba has none (0.59 to 0.63 have)."""
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    return file if hasattr(file, "_load_index") else None


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether nobody waits for the compilation of a function of :func:`njit`.

    Its machine code is in this process, or on disk for its source as it is. True as well where numba has no folder, or
    another version of it does not show what is there: then nothing is known, and nothing can be done ahead.
    """
    file = _index_file(function)
    if getattr(function, "signatures", None) or file is None:
        return True
    try:
        return bool(file._load_index())
    except OSError:
        return True
