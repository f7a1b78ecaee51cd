"""Arguments of ``panpipe.pipeline`` that a framework has itself."""

from collections.abc import Mapping
from typing import Any

from attrs import evolve, fields

from ..core.errors import RequestError
from ..runtimes.settings import Run, Update

_GROUPS: dict[str, type] = {"update": Update, "run": Run}


def refuse_twice(who: str, given: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse arguments that follow from a framework's own.

    Args:
        who: what the user gave them to, and the framework, as in ``PanpipeStrategy lightning``.
        given: the arguments.
        own: the name of an argument, or of a field of a group, and what the framework has in its place.

    Raises:
        RequestError: the first one.
    """
    place, framework = who.rsplit(" ", 1)
    names = [*given]
    for name, group in _GROUPS.items():
        if name in given:
            names += [
                f.name for f in fields(group) if f.init and getattr(given[name], f.name) != getattr(group(), f.name)
            ]
    twice = next((name for name in names if name in own), None)
    if twice is not None:
        raise RequestError(f"{place} has '{twice}', which {framework} has itself: use {own[twice]}")


def with_own(given: Mapping[str, Any], update: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with fields of their groups that follow from a framework's own."""
    return {
        **given,
        "update": evolve(given.get("update") or Update(), **update),
        "run": evolve(given.get("run") or Run(), **run),
    }
