"""Backends by name: those of panpipe, and those that other packages add.

A package adds one through the entry-point group ``panpipe.backends``: the entry point names a ``BackendKind``.
"""

import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from attrs import frozen

from ..core.errors import RequestError
from . import gloo, memcpy
from .kind import BackendKind

GROUP = "panpipe.backends"
BUILT_IN = (memcpy.KIND, gloo.KIND)


@frozen
class LeftOut:
    """A plug-in that cannot be used.

    Args:
        name, value: of its entry point.
        reason: what is wrong with it.
    """

    name: str
    value: str
    reason: str


@frozen
class Plugins:
    """What other packages add.

    Args:
        kinds: by name.
        left_out: those that cannot be loaded, are no ``BackendKind``, or take a name that is taken.
    """

    kinds: dict[str, BackendKind]
    left_out: tuple[LeftOut, ...]


@cache
def plugins() -> Plugins:
    """The plug-ins; one that cannot be used hides no other."""
    taken, kinds, left_out = {kind.name for kind in BUILT_IN}, dict[str, BackendKind](), []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        found = _load(point, taken | kinds.keys())
        if isinstance(found, BackendKind):
            kinds[found.name] = found
        else:
            left_out.append(LeftOut(point.name, point.value, found))
    return Plugins(kinds, tuple(left_out))


def _load(point: EntryPoint, taken: set[str]) -> BackendKind | str:
    """The kind, or why there is none."""
    try:
        kind = point.load()
    except Exception as error:
        return f"loading it failed with {error!r}"
    if not isinstance(kind, BackendKind):
        return f"it is a {type(kind).__name__}, not a BackendKind"
    return f"the name '{kind.name}' is taken" if kind.name in taken else kind


def known_backends() -> dict[str, BackendKind]:
    """All kinds by name: panpipe's own, then those of plug-ins."""
    return {kind.name: kind for kind in BUILT_IN} | plugins().kinds


@cache
def _warn_of_left_out() -> None:
    for one in plugins().left_out:
        warnings.warn(f"backend plug-in '{one.name}' ({one.value}) is left out: {one.reason}", stacklevel=3)


def find_backend(wanted: str | BackendKind) -> BackendKind:
    """The kind of that name, or the kind itself, if it can be used here.

    Raises:
        RequestError: there is none, with a list of those known; or it cannot be used here.

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
