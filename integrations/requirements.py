"""Importing a framework, and arguments of ``panpipe.pipeline`` that it has itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from ..core.errors import RequestError
from ..runtimes.settings import Run, Update, values_of


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for the imports of a framework.

    Args:
        extra: the extra of panpipe that installs it.

    Raises:
        ImportError: the framework, or a part of it, is not installed; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"panpipe.integrations.{extra} needs the package '{missing.name}', which is not installed: "
            f"pip install 'panpipe[{extra}]'",
            name=missing.name,
        ) from missing


_GROUPS: dict[str, type] = {"update": Update, "run": Run}


def refuse_twice(place: str, framework: str, given: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse arguments that follow from a framework's own.

    Args:
        place: what the user gave them to.
        own: the name of an argument, or of a field of a group, and what the framework has in its place.

    Raises:
        RequestError: the first one.
    """
    names = [*given]
    for name, group in _GROUPS.items():
        usual = values_of(group(), group)
        names += [each for each, value in values_of(given.get(name, group()), group).items() if value != usual[each]]
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
