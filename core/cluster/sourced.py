"""Numbers with their sources, as files have them: ``{ value = 312e12, source = "…" }``.

``assumed`` in place of ``source`` marks a number that is neither published nor measured for exactly this part.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cache
from math import isfinite
from typing import Any, TypeVar, cast

from attrs import asdict, frozen
from cattrs.gen import make_dict_structure_fn

from ..documents import converter, reasons
from ..errors import RequestError

T = TypeVar("T")


@frozen
class Source:
    """Where a number comes from.

    Args:
        text: the page, paper, code or measurement; for an assumption, its reason.
        assumed: whether the number is neither published nor measured for exactly this part.
    """

    text: str
    assumed: bool = False

    def __str__(self) -> str:
        return f"assumed: {self.text}" if self.assumed else self.text


def is_number(value: object) -> bool:
    """Whether a table is a number with its source."""
    return isinstance(value, dict) and "value" in value


def separate(table: Mapping[str, Any], where: str, path: str = "") -> tuple[dict[str, Any], dict[str, Source]]:
    """Split a table into one with bare numbers, and the source of each number by its dotted name.

    Raises:
        RequestError: a number has neither ``source`` nor ``assumed``, or both.
    """
    plain: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for key, value in table.items():
        name = f"{path}{key}"
        if is_number(value):
            sources[name] = _source(value, f"{name} of {where}")
            plain[key] = value["value"]
        elif isinstance(value, dict):
            plain[key], below = separate(value, where, f"{name}.")
            sources |= below
        elif isinstance(value, int | float) and not isinstance(value, bool):
            raise RequestError(
                f'{name} of {where} is a bare {value}: write {{ value = {value}, source = "…" }}, or assumed = "…"'
            )
        else:
            plain[key] = value
    return plain, sources


def _source(number: Mapping[str, Any], what: str) -> Source:
    keys = set(number) - {"value"}
    if keys not in ({"source"}, {"assumed"}):
        raise RequestError(f"{what} has {' and '.join(sorted(keys)) or 'no source'}: give one of source and assumed")
    text = number.get("source", number.get("assumed"))
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{what} has the source {text!r}: describe in words where the number comes from")
    return Source(text, "assumed" in number)


def check_numbers(part: Any, what: str, numbers: Iterable[tuple[str, float]], zero: Collection[str]) -> None:
    """Check the numbers of an object with ``sources``.

    Args:
        part: the object; ``what`` is the word for it in messages.
        numbers: each number with its name in ``sources``.
        zero: names of those that may be 0.

    Raises:
        RequestError: a number is not finite, negative, or 0, or has no source.
    """
    for name, value in numbers:
        if not (isfinite(value) and (value > 0 or (name in zero and value == 0))):
            rule = "at least 0" if name in zero else "above 0"
            raise RequestError(f"{name} of {what} '{part.name}' is {value}: it must be a finite number {rule}")
        if name not in part.sources:
            raise RequestError(f"{name} of {what} '{part.name}' has no source: say where {value:g} comes from")


def structured(table: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Build a class with ``sources`` from its table.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    plain, sources = separate(table, where)
    try:
        tables = {path: asdict(source) for path, source in sources.items()}
        result: T = _structure(cast(Hashable, kind))({**plain, "sources": tables}, kind)
        return result
    except Exception as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{where} is wrong: {reasons(error, str(plain.get('name')))}") from None


@cache
def _structure(kind: Hashable) -> Callable[[Mapping[str, Any], Any], Any]:
    return make_dict_structure_fn(cast(type[Any], kind), converter, _cattrs_forbid_extra_keys=True)


def joined(value: Any) -> dict[str, Any]:
    """The table of an object with ``sources``: the inverse of :func:`structured`."""
    plain = asdict(value, filter=lambda attribute, item: attribute.name != "sources" and item is not None)
    sources: Mapping[str, Source] = value.sources
    for path, source in sources.items():
        *above, key = path.split(".")
        table = plain
        for step in above:
            table = table[step]
        table[key] = {"value": table[key], "assumed" if source.assumed else "source": source.text}
    return plain
