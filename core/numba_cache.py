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
