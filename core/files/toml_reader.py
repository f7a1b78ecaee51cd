"""TOML of unknown origin, as plain data within limits."""

import tomllib
from datetime import date, datetime, time
from typing import Any

from ..errors import RequestError
from .json_reader import check_texts
from .limits import CATALOGUE, Limits, short


def parse_toml(text: str, origin: str, limits: Limits = CATALOGUE) -> dict[str, Any]:
    """Read TOML.

    Args:
        text: of the file.
        origin: the name to use for it in errors, usually its path.
        limits: of its format.

    Raises:
        RequestError: it is not TOML, exceeds a limit, or has a date.
    """
    longest = max(map(len, text.splitlines()), default=0)
    if limits.lines is not None and longest > limits.lines:
        raise RequestError(f"{origin} has a line of {longest} characters: at most {limits.lines} are read; divide it")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{origin} is not a TOML file: {str(error).splitlines()[0]}; correct it") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise RequestError(f"{origin} is not a TOML file: {error}; correct it") from None
    except RecursionError:
        raise RequestError(f"{origin} is nested deeper than {limits.depth} levels: correct it") from None
    check_texts(data, origin, limits)
    _check_numbers(data, origin, limits)
    return data


def _check_numbers(data: Any, origin: str, limits: Limits) -> None:
    """Refuse dates, and integers outside the limit. The depth is checked already."""
    below = data.values() if isinstance(data, dict) else data
    for value in below:
        if isinstance(value, dict | list):
            _check_numbers(value, origin, limits)
        elif isinstance(value, datetime | date | time):
            raise RequestError(f"{origin} has the date {value}: it has texts and numbers only; write it in quotes")
        elif isinstance(value, int) and abs(value) >= limits.integer:
            raise RequestError(f"{origin} has the integer {short(value)}: give one below {limits.integer:.4g}")
