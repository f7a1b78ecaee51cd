"""Panpipe's files: JSON documents that name their format and version, read strictly.

One converter (cattrs) serves all of them. Writing is deterministic: the same object gives the same bytes.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import cattrs

from .actions import Action, parse_action
from .errors import RequestError

T = TypeVar("T")

MOST_BYTES = 256 << 20
"""Default size limit of a file to read: a plan for a thousand devices has some MB."""

converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
converter.register_unstructure_hook(Action, str)
converter.register_structure_hook(Action, lambda text, _: parse_action(text))


def _number(value: object, _: type) -> float:
    """A number as the file has it: 0 stays 0 and does not become 0.0, so that writing gives the same bytes again."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return value


def _whole_number(value: object, _: type) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)  # other programs write 1e9 for a billion


def _truth(value: object, _: type) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


converter.register_structure_hook(float, _number)
converter.register_structure_hook(bool, _truth)
converter.register_structure_hook(int, _whole_number)


def to_json(format_name: str, value: object) -> str:
    """Write an attrs object as a document: its format first, then its fields in their order."""
    return json.dumps({"format": format_name, **converter.unstructure(value)}, indent=1) + "\n"


def from_json(text: str, format_name: str, kind: type[T], origin: str) -> T:
    """Read a document.

    Args:
        text: the document.
        format_name: the format that it must state, such as ``panpipe.plan/1``.
        kind: the attrs class to build.
        origin: the name to use for it in errors, usually its path.

    Raises:
        RequestError: it is not JSON, is of another format or version, or a field is missing, unknown or wrong.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise RequestError(f"{origin} is nested deeper than any {format_name}: write it again with panpipe") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{origin} is not a whole JSON file (line {error.lineno}: {error.msg}): write it again with panpipe"
        ) from None
    if not isinstance(data, dict):
        raise RequestError(f"{origin} holds a {type(data).__name__}, not the object that {format_name} needs")
    check_format(data.pop("format", None), format_name, origin)
    try:
        return converter.structure(data, kind)
    except Exception as error:
        raise RequestError(f"{origin} is not a valid {format_name}: {reasons(error, format_name)}") from None


def reasons(error: Exception, path: str) -> str:
    """Why data was refused, in one line: the first three reasons, each with its place below ``path``."""
    return "; ".join(cattrs.transform_error(error, path=path, format_exception=_reason)[:3])


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
            f"{origin} is of format '{found}'; this panpipe reads version {version}: "
            "use the panpipe that wrote it, or write it again with this one"
        )
    raise RequestError(f'{origin} is not a {family} file: it must state "format": "{wanted}", and states {found!r}')


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a file that the user named.

    Raises:
        RequestError: there is no such file, it is not text, or it has more than ``most_bytes``.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise RequestError(
                f"'{path}' has more than {most_bytes >> 20} MiB, which is too much to read: give another"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"cannot read '{path}': {reason}; give the path of a readable file") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}; give a path that can be written") from None


def as_plain(value: Any) -> Any:
    """An attrs object as plain dictionaries and lists, for ``--json``."""
    return converter.unstructure(value)
