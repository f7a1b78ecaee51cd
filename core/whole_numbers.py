"""Arguments that are whole numbers, as an int or an integer of another library such as numpy."""

import operator
from typing import Any

from .errors import RequestError


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The argument as an int.

    Args:
        least: the smallest number allowed; None for any.

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
