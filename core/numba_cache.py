"""Functions compiled by numba, whose machine code is kept on disk where there is a folder for it.

numba keeps it next to the sources, else in the user's cache. Where neither can be written, as in a container with an
installation of somebody else's and no home, it refuses to make such a function at all; it is then compiled in each
process anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

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
            compiled = numba.njit(**options)(function)
        return compiled

    return decorate


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether nobody waits for the compilation of a function of :func:`njit`.

    Its machine code is in this process, or on disk for its source as it is. True as well where numba has no folder, or
    another version of it does not show what is there: then nothing is known, and nothing can be done ahead.
    """
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    index = getattr(file, "_load_index", None)  # numba has no public function for it (0.59 to 0.63)
    if getattr(function, "signatures", None) or index is None:
        return True
    try:
        return bool(index())
    except OSError:
        return True
