"""Suggestions for an unknown name."""

import difflib
from collections.abc import Iterable, Sequence

FEW = 16
"""Largest number of names that an error lists in full."""


def nearest(name: str, known: Iterable[str], listing: str = "") -> str:
    """The known names that are similar to this one; if there are none, all names, or the nearest of many.

    Args:
        listing: the command that prints all of them, if there may be many.
    """
    names = {other.casefold(): other for other in known}
    same = [other for other in names.values() if letters_of(other) == letters_of(name)]
    if same and name.casefold() not in names:
        return f"did you mean {_any_of(same)}"
    close = difflib.get_close_matches(name.casefold(), names, n=4, cutoff=0.5)
    if close:
        return f"did you mean {_any_of([names[other] for other in close])}"
    if len(names) <= FEW:
        return f"known are {', '.join(names.values())}"
    near = difflib.get_close_matches(name.casefold(), names, n=4, cutoff=0.0)
    see = f"; see {listing}" if listing else ""
    return f"the nearest of {len(names)} names are {', '.join(names[other] for other in near)}{see}"


def _any_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def letters_of(name: str) -> str:
    """A name without case and punctuation, which are often left out: ``zb-v`` and ``ZBV`` are the same."""
    return "".join(character for character in name.casefold() if character.isalnum())
