"""What to suggest for a name that is not known."""

import difflib
from collections.abc import Iterable

FEW = 16
"""Names at most that an error lists in full."""


def nearest(name: str, known: Iterable[str], listing: str = "") -> str:
    """The known names that look like this one; else all of them, or of many the nearest.

    Args:
        name: the one that is not known.
        known: those that are.
        listing: the command that shows all of them, where there may be many.
    """
    names = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(name.casefold(), names, n=4, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(names[other] for other in close)}"
    if len(names) <= FEW:
        return f"known are {', '.join(names.values())}"
    near = difflib.get_close_matches(name.casefold(), names, n=4, cutoff=0.0)
    see = f"; see {listing}" if listing else ""
    return f"the nearest of {len(names)} names are {', '.join(names[other] for other in near)}{see}"
