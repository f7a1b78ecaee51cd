"""JSON of unknown origin, as plain data within limits.

Strict beyond the standard's grammar: no key twice in an object, because readers disagree about which one counts. The
range of numbers and the length of texts are checked by the fields that take them, whose errors have the place.
"""

import json
from collections.abc import Callable
from typing import Any

from ..errors import RequestError
from .limits import DOCUMENT, Limits, short


def parse_json(
    text: str, origin: str, limits: Limits = DOCUMENT, *, parse_float: Callable[[str], Any] | None = None
) -> Any:
    """Read JSON.

    Args:
        origin: the name to use for it in errors, usually its path.
        parse_float: text of a number with a fraction or an exponent → the number; by default a float.

    Raises:
        RequestError: it is not JSON, or exceeds a limit.
    """
    check_values(text, origin, limits)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=parse_float)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise RequestError(f"{origin} is empty: give a JSON file") from None
        raise RequestError(
            f"{origin} is not a whole JSON file (line {error.lineno}: {error.msg}): correct it, or write it again"
        ) from None
    except (ValueError, ArithmeticError) as error:  # a key twice; a number of thousands of digits
        raise RequestError(f"{origin} cannot be read: {str(error)[:200]}; write it again with panpipe") from None
    except RecursionError:
        raise RequestError(f"{origin} is nested too deeply: write it again with panpipe") from None


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
