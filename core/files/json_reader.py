"""JSON of unknown origin, as plain data within limits.

Strict beyond the standard's grammar: no key twice in an object (readers disagree about which one counts), no number
that a float or a 64-bit integer cannot represent. ``NaN`` and ``Infinity`` are read as floats, and refused by the
fields that take numbers, whose errors have the place.
"""

import json
import re
from collections.abc import Callable
from math import isfinite
from typing import Any

from ..errors import RequestError
from .limits import DOCUMENT, MOST_DIGITS, Limits, short

_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(
    text: str, origin: str, limits: Limits = DOCUMENT, *, parse_float: Callable[[str], Any] | None = None
) -> Any:
    """Read JSON.

    Args:
        text: of the file.
        origin: the name to use for it in errors, usually its path.
        limits: of its format.
        parse_float: text of a number with a fraction or an exponent → the number; by default a finite float.

    Raises:
        RequestError: it is not JSON, or exceeds a limit.
    """
    check_values(text, origin, limits)
    numbers = _Numbers(parse_float, limits.integer)
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_int=numbers.integer, parse_float=numbers.float)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise RequestError(f"{origin} is empty: give a JSON file") from None
        raise RequestError(
            f"{origin} is not a whole JSON file (line {error.lineno}: {error.msg}): correct it, or write it again"
        ) from None
    except ValueError as error:
        raise RequestError(f"{origin} cannot be read: {error}; write it again with panpipe") from None
    except RecursionError:
        raise RequestError(_nested(origin, limits)) from None
    check_texts(data, origin, limits)
    return data


def check_values(text: str, origin: str, limits: Limits) -> None:
    """Refuse too many values before anything is built: each takes memory.

    Raises:
        RequestError: the text has more values than the limit.
    """
    if values_in(text.encode("utf-8", "surrogatepass")) > limits.values:
        raise RequestError(
            f"{origin} has more than {limits.values} values, which is too much to read: write it again with panpipe"
        )


def values_in(data: bytes) -> int:
    """About how many values JSON has, at least as many as there are."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {short(twice)} twice")
    return found


class _Numbers:
    """The parsers of numbers."""

    def __init__(self, parse_float: Callable[[str], Any] | None, largest: int) -> None:
        self._parse_float, self._largest = parse_float, largest
        self._digits = len(str(largest)) + 1

    def integer(self, text: str) -> int:
        value = int(text) if len(text) <= self._digits else self._largest
        if not -self._largest < value < self._largest:
            raise ValueError(f"the integer {text[:24]}… has {len(text)} digits: it must be below {self._largest:.4g}")
        return value

    def float(self, text: str) -> Any:
        if len(text) > MOST_DIGITS:
            raise ValueError(f"the number {text[:24]}… has {len(text)} characters, and at most {MOST_DIGITS} are read")
        value = float(text)
        if not isfinite(value):
            raise ValueError(f"the number {text[:24]} is too large for a float")
        return value if self._parse_float is None else self._parse_float(text)


def check_texts(data: Any, origin: str, limits: Limits) -> None:
    """Check every text and key of plain data, and its depth and its number of values.

    Raises:
        RequestError: one is longer than the limit, or has characters that cannot be printed.
    """
    level, depth, values = [data], 0, 0
    while level:
        below: list[Any] = []
        values += len(level)
        containers = False
        for value in level:
            if isinstance(value, str):
                _check_text(value, origin, limits)
            elif isinstance(value, dict):
                containers = True
                for key in value:
                    _check_text(key, origin, limits)
                below += value.values()
            elif isinstance(value, list):
                containers = True
                below += value
        level, depth = below, depth + containers
        if depth > limits.depth:
            raise RequestError(_nested(origin, limits))
        if values > limits.values:
            raise RequestError(f"{origin} has too many values: write it again with panpipe")


def _nested(origin: str, limits: Limits) -> str:
    return f"{origin} is nested deeper than {limits.depth} levels: write it again with panpipe"


def _check_text(text: str, origin: str, limits: Limits) -> None:
    if len(text) > limits.text:
        raise RequestError(
            f"{origin} has a text of {len(text)} characters, {short(text[:40])}…: at most {limits.text} are read; "
            "shorten it"
        )
    if text.isprintable() or not (limits.printable or _SURROGATE.search(text)):
        return
    raise RequestError(f"{origin} has the text {short(text)}, with characters that cannot be printed: remove them")
