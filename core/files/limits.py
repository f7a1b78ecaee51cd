"""What a file may contain. A file may come from anybody: its size, nesting, texts and numbers are checked before use.

The limits are far above what panpipe writes, and low enough that no file exhausts memory or reaches compiled code with
a number that it does not support.
"""

from attrs import frozen

from ..errors import RequestError

LONGEST_TEXT = 4096
"""Characters of a text of a document."""
LARGEST_INTEGER = 2**53
"""Largest value of an integer field (sizes in bytes, counts): exact as a 64-bit float."""
LARGEST_FLOAT, SMALLEST_FLOAT = 1e30, 1e-30
"""Range of the absolute value of a number other than 0. Products and quotients of a few such numbers are finite."""
LONGEST_S = 365 * 24 * 3600.0
"""The longest time of an operator, a stage or a link: a year. A longer one has a wrong unit, and sums of such times
lose all digits."""
MOST_DEVICES = 1 << 16
"""Devices of a cluster, a mesh or a trace."""
MOST_INDEX = 10**7
"""Largest stage, microbatch or device number."""
MOST_SHOWN = 80
"""Characters of a value in an error message."""


@frozen
class Limits:
    """Limits of one format.

    Args:
        size: bytes of the file.
        values: objects, lists, texts and numbers together; each takes about 100 bytes of memory.
    """

    size: int = 128 << 20
    values: int = 8_000_000


DOCUMENT = Limits()
"""Plans (one of 512 stages and 4,096 microbatches has 46 MB, with 4.2 million actions), operator graphs, clusters and
other JSON documents; schedule files, whose values are cells."""
CATALOGUE = Limits(size=1 << 20)
"""TOML files."""
TRACE = Limits(size=256 << 20)
"""Traces, also of other programs: about half a million events."""


def short(value: object) -> str:
    """A value of a file for an error message: at most `MOST_SHOWN` characters, however large it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**MOST_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]!r}… ({len(value)} characters)"
    shown = repr(value)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"


def check_count(name: str, value: int, most: int = MOST_INDEX, least: int = 0) -> None:
    """Check a count or number of a file.

    Raises:
        RequestError: it is outside ``least`` … ``most``.
    """
    if not least <= value <= most:
        raise RequestError(f"{name} is {short(value)}: it must be from {least} to {most}; correct it")


def check_seconds(name: str, value: float) -> None:
    """Check a time in seconds.

    Raises:
        RequestError: it is negative, not finite, or above `LONGEST_S`.
    """
    if not 0 <= value < float("inf"):
        raise RequestError(f"{name} is {value}: a time must be finite, at least 0")
    if value > LONGEST_S:
        raise RequestError(f"{name} is {value:g} s, more than a year: give seconds")
