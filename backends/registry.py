"""Backends by name: panpipe's own, and those that other packages add.

A package adds one through the entry-point group ``panpipe.backends``: the entry point names a ``BackendKind``.
"""

from functools import cache

from ..core.errors import RequestError, warn_caller
from ..core.plugins import LeftOut, load_plugins
from . import gloo, memcpy, nccl
from .kind import BackendKind

GROUP = "panpipe.backends"
BUILT_IN = (memcpy.KIND, gloo.KIND, nccl.KIND)


@cache
def plugins() -> tuple[dict[str, BackendKind], tuple[LeftOut, ...]]:
    """The backends of other packages by name; and the plug-ins that cannot be loaded, are no ``BackendKind``, or have a
    name that is taken. One that cannot be used does not affect the others."""
    kinds, taken = dict[str, BackendKind](), {kind.name for kind in BUILT_IN}

    def add(kind: object) -> None:
        if not isinstance(kind, BackendKind):
            raise RequestError(f"it is a {type(kind).__name__}, not a BackendKind")
        if kind.name in taken | kinds.keys():
            raise RequestError(f"the name '{kind.name}' is taken")
        kinds[kind.name] = kind

    return kinds, load_plugins(GROUP, add)


def known_backends() -> dict[str, BackendKind]:
    """All kinds by name: panpipe's own, then those of plug-ins."""
    return {kind.name: kind for kind in BUILT_IN} | plugins()[0]


@cache
def _warn_of_left_out() -> None:
    for one in plugins()[1]:
        warn_caller(str(one))


def find_backend(wanted: str | BackendKind) -> BackendKind:
    """The kind of that name, or the kind itself, if it can be used here.

    Raises:
        RequestError: there is none, and the message lists the known ones; or it cannot be used here.

    Warns:
        UserWarning: once, for each plug-in that is left out.
    """
    _warn_of_left_out()
    known = known_backends()
    if not isinstance(wanted, BackendKind) and wanted not in known:
        raise RequestError(f"there is no backend '{wanted}': known are {', '.join(known)}")
    kind = wanted if isinstance(wanted, BackendKind) else known[wanted]
    reason = kind.unavailable
    if reason is not None:
        usable = ", ".join(kind.name for kind in known.values() if kind.unavailable is None)
        raise RequestError(f"backend '{kind.name}' cannot be used here: {reason}; usable are {usable}")
    return kind
