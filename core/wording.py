"""Texts for messages: counts, lists of names, shapes, modules, suggestions for an unknown name."""

import difflib
from collections.abc import Iterable, Sequence


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 device``, ``2 devices``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def signed_percent(share: float) -> str:
    """A difference as a share: ``+1.2%``; ``0.0%`` without a sign."""
    text = f"{share:+.1%}"
    return "0.0%" if text[1:] == "0.0%" else text


def first_of(names: Sequence[str], shown: int = 1) -> str:
    """The first of several names and the number of the others: ``wte.weight and 3 more``."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def shape_text(shape: Iterable[int]) -> str:
    """A shape: ``8×3×224``, or ``scalar`` for one without dimensions."""
    return "×".join(map(str, shape)) or "scalar"


def value_text(value: object) -> str:
    """A value of a wrong type: its representation if that is short and no address, otherwise its type."""
    text = " ".join(repr(value).split())
    if len(text) <= 60 and " at 0x" not in text:
        return text
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def module_text(name: str) -> str:
    """A module by its qualified name: ``module 'h.0.attn'``, or ``the model`` for the root."""
    return f"module '{name}'" if name else "the model"


FEW = 16
"""Largest number of names that an error lists in full."""


def nearest(name: str, known: Iterable[str], listing: str = "") -> str:
    """The known names that are similar to this one; if there are none, all names, or the nearest of many.

    Args:
        listing: the command that prints all of them, if there may be many.
    """
    names = {other.casefold(): other for other in known}
    same = [other for other in names.values() if letters_of(other) == letters_of(name)]
    if same:
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
