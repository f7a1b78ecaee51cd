"""Names of schedules: what those of searched ones mean, in words, and short ones for tables."""

import re

_SEARCHED = re.compile(r"auto\((?P<inner>.*)\)", re.DOTALL)
LISTED, PACKED, PERIODIC = "listed", "packed", "periodic"
"""Names of orders that the search makes itself, in place of a family's: those of list scheduling, those of one
microbatch after another on devices that fit, and those that repeat one pattern."""
_OWN = "an order that the search made for these costs and limits, not from a published schedule"


_PER_DEVICE = re.compile(r",?run_ahead=\[?[\d, ]*\d\]?")


def short_name(name: str) -> str:
    """A schedule's name without numbers for each device; JSON has the whole name."""
    return _PER_DEVICE.sub("", name).replace("microbatches_per_loop", "group")


def meaning_of(name: str) -> str | None:
    """One line for the name of a schedule that the search found; None for a published schedule.

    Args:
        name: ``listed``, ``auto(1f1b)``, ``auto(listed)``, ``auto(evaluations=100,seed=0)`` or a family's name.
    """
    own = (LISTED, PACKED, PERIODIC)
    if name.startswith(own):
        return _OWN
    found = _SEARCHED.fullmatch(name)
    if found is None:
        return None
    inner = found["inner"]
    if inner.startswith(own):
        return f"{_OWN}, improved by moves"
    if re.match(r"(evaluations|seconds)=", inner):
        return "an order that the search found, from published schedules and others; in brackets its budget and seed"
    family = inner.partition("(")[0]
    return f"an order that the search derived from {family}, whose own order is slower here or needs more memory"
