"""Panpipe's files: JSON documents that name their format and version, read strictly.

One converter (cattrs) serves all of them. Writing is deterministic: the same object gives the same bytes. Reading has
limits (``files/limits``): a document of unknown origin becomes an object or a RequestError of one line.
"""

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args

import cattrs
from cattrs.errors import IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_unstructure_fn, override

from .actions import Action, parse_action
from .errors import RequestError, printed
from .files.json_reader import parse_json
from .files.limits import DOCUMENT, LARGEST_FLOAT, LARGEST_INTEGER, LONGEST_TEXT, SMALLEST_FLOAT, Limits, short
from .files.read import read_text

T = TypeVar("T")

MOST_REASONS = 3
"""Faults of a document that its error lists; no more are collected."""

converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
converter.register_unstructure_hook(Action, str)


def _action(text: object, _: type) -> Action:
    if not isinstance(text, str):
        raise ValueError(f"{short(text)} is not an action, such as '2F0'")
    return parse_action(text)


def _number(value: object, _: type) -> float:
    """A number as the file has it: 0 stays 0 and does not become 0.0, so that writing gives the same bytes again."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{short(value)} is not a number")
    if not -inf < value < inf:
        raise ValueError(f"{value} is not a finite number")
    if not (value == 0 or SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT):
        raise ValueError(f"{short(value)} is outside the range of numbers, {SMALLEST_FLOAT:g} to {LARGEST_FLOAT:g}")
    return value


def _whole_number(value: object, _: type) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"{short(value)} is not a whole number")
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{short(value)} is above 2^53, the largest whole number of a file")
    return int(value)  # other programs write 1e9 for a billion


def _truth(value: object, _: type) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{short(value)} is neither true nor false")
    return value


def _text(value: object, _: type) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is not a text")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"{short(value)} is a text of more than {LONGEST_TEXT} characters")
    if not value.isprintable():
        raise ValueError(f"{short(value)} has characters that cannot be printed")
    return value


def _items(kind: Any) -> Callable[[Any, Any], Any]:
    """The reader of a list whose items are of one type; it stops after `MOST_REASONS` wrong items."""
    item = get_args(kind)[0]

    def read(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{short(value)} is not a list")
        structure = converter.get_structure_hook(item)
        found, errors = [], []
        for position, one in enumerate(value):
            try:
                found.append(structure(one, item))
            except Exception as error:
                where = f"Structuring {kind} @ index {position}"
                error.__notes__ = [*getattr(error, "__notes__", ()), IterableValidationNote(where, position, item)]
                errors.append(error)
                if len(errors) == MOST_REASONS:
                    break
        if errors:
            raise IterableValidationError(f"While structuring {kind}", errors, kind)
        return tuple(found)

    return read


def _is_uniform_tuple(kind: Any) -> bool:
    arguments = get_args(kind)
    return getattr(kind, "__origin__", None) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis


converter.register_structure_hook(Action, _action)
converter.register_structure_hook(float, _number)
converter.register_structure_hook(bool, _truth)
converter.register_structure_hook(int, _whole_number)
converter.register_structure_hook(str, _text)
converter.register_structure_hook_factory(_is_uniform_tuple, _items)


def omit_at_default(kind: type, *names: str) -> None:
    """Write fields of a class only where they differ from their default: those that were added later, so that older
    files keep their bytes and hashes."""
    later: dict[str, Any] = dict.fromkeys(names, override(omit_if_default=True))
    converter.register_unstructure_hook(kind, make_dict_unstructure_fn(kind, converter, **later))


def to_json(format_name: str, value: object) -> str:
    """Write an attrs object as a document: its format first, then its fields in their order.

    Raises:
        RequestError: it has a number that is not finite.
    """
    try:
        return json.dumps({"format": format_name, **converter.unstructure(value)}, indent=1, allow_nan=False) + "\n"
    except ValueError:
        raise RequestError(
            f"a number of this {format_name} is infinite or no number, which JSON does not have: give finite numbers"
        ) from None


def from_json(text: str, format_name: str, kind: type[T], origin: str, limits: Limits = DOCUMENT) -> T:
    """Read a document.

    Args:
        format_name: the format that it must state, such as ``panpipe.plan/1``.
        origin: the name to use for it in errors, usually its path.

    Raises:
        RequestError: it is not JSON, exceeds a limit, is of another format or version, or a field is missing, unknown
            or wrong.
    """
    return from_plain(parse_json(text, origin, limits), format_name, kind, origin)


def read_document(path: str | Path, format_name: str, kind: type[T], limits: Limits = DOCUMENT) -> T:
    """Read a document's file.

    Raises:
        RequestError: the file cannot be read, or as in `from_json`.
    """
    return from_json(read_text(path, limits), format_name, kind, str(path), limits)


def from_plain(data: object, format_name: str, kind: type[T], origin: str) -> T:
    """Build the object of a document that is parsed already. Errors as in `from_json`."""
    if not isinstance(data, dict):
        raise RequestError(f"{origin} holds a {type(data).__name__}, not the object that {format_name} needs")
    check_format(data.get("format"), format_name, origin)
    try:
        return converter.structure({key: value for key, value in data.items() if key != "format"}, kind)
    except RecursionError:
        raise RequestError(f"{origin} is nested deeper than any {format_name}: write it again with panpipe") from None
    except Exception as error:
        raise RequestError(f"{origin} is not a valid {format_name}: {reasons(error, format_name)}") from None


def reasons(error: Exception, path: str) -> str:
    """Why data was refused, in one line: the first three reasons, each with its place below ``path``."""
    found = cattrs.transform_error(error, path=path, format_exception=_reason)[:MOST_REASONS]
    texts = (printed(RequestError(reason)) for reason in found)  # an unknown key may have control characters
    return "; ".join(text if len(text) <= 500 else f"{text[:500]}…" for text in texts)


def _reason(error: BaseException, kind: type | None) -> str:
    """The message of a class's validation or of a hook above, which names the value; otherwise cattrs's message."""
    if isinstance(error, RequestError):
        return str(error)
    own = isinstance(error, ValueError) and not isinstance(error, cattrs.errors.ForbiddenExtraKeysError) and str(error)
    return str(error) if own else cattrs.v.format_exception(error, kind)


def check_format(found: object, wanted: str, origin: str) -> None:
    """Refuse a document that states another format, or another version of it."""
    if found == wanted:
        return
    family, version = wanted.split("/")
    if isinstance(found, str) and found.split("/")[0] == family:
        raise RequestError(
            f"{origin} is of format {short(found)}; this panpipe reads version {version}: "
            "use the panpipe that wrote it, or write it again with this one"
        )
    raise RequestError(
        f'{origin} is not a {family} file: it must state "format": "{wanted}", and states {short(found)}'
    )


def as_plain(value: Any) -> Any:
    """An attrs object as plain dictionaries and lists, for ``--json``."""
    return converter.unstructure(value)
