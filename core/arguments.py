"""Arguments as people write them: sizes in bytes (``20e9``, ``"20GB"``, ``"20GiB"``), and whole numbers as an int or an
integer of another library such as numpy.
"""

import math
import operator
import re
from typing import Any

from .errors import RequestError

_UNITS = {"": 1, **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T", "P"))},
          **{f"{p}IB": 1024**n for n, p in enumerate(("K", "M", "G", "T", "P"), 1)}}  # fmt: skip
_SIZE = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")
_LEAST = 1 << 20
"""Bytes below which a limit without a unit is taken for a forgotten unit: no model fits."""


def byte_size(name: str, value: Any, model: bool = False) -> float | None:
    """A size in bytes.

    Args:
        name: of the argument, for messages.
        value: a number of bytes, or a text with a unit: B, KB, MB, GB, TB and PB are powers of 1000, KiB to PiB powers
            of 1024. None stays None.
        model: whether a model has to fit, so that a number below 1 MiB lacks its unit.

    Raises:
        RequestError: it is no size, or lacks its unit.
    """
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = match[2].upper() if match is not None else ""
    try:
        number = float(match[1] if match is not None else value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    found = number * _UNITS.get(unit, math.nan)
    if not 0 <= found < math.inf:
        rule = "give bytes, at least 0, with or without a unit, as in 20GB or 16GiB"
        raise RequestError(f"{name} is {value!r:.40}: {rule}")
    if model and not unit and found < _LEAST:
        rule = f"in which no model fits: give the unit, too, as in {number or 20:g}GB"
        raise RequestError(f"{name} is {number:g} bytes, {rule}")
    return int(found) if found == int(found) else found


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The argument as an int.

    Raises:
        RequestError: it is no whole number, or a smaller one.
    """
    wanted = "a whole number" if least is None else f"a whole number, at least {least}"
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        raise RequestError(f"{name} is {value!r:.40}: give {wanted}")
    return found
