"""The one limit on waiting: seconds without progress after which ranks that wait for each other end."""

import math
import os

from ...core.errors import RequestError

TIMEOUT_S = 300.0
"""The limit by default: one rank may still read its model while another one has captured it."""
VARIABLE = "PANPIPE_TIMEOUT_S"
"""The environment variable that replaces the default."""


def timeout_of(given: float | None) -> float:
    """The limit in seconds: the given one, the variable's, or `TIMEOUT_S`.

    Raises:
        RequestError: it is not a finite number above 0.
    """
    if given is not None:
        return _checked(given, f"timeout_s is {given!r}")
    text = os.environ.get(VARIABLE)
    if text is None:
        return TIMEOUT_S
    try:
        return _checked(float(text), f"{VARIABLE} is '{text}'")
    except ValueError:
        return _checked(math.nan, f"{VARIABLE} is '{text}'")


def _checked(seconds: float, what: str) -> float:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        raise RequestError(
            f"{what}: give a finite number of seconds above 0, after which ranks stop waiting for each other"
        )
    return float(seconds)
