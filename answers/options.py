"""Options of commands, declared once: as arguments of a command, or as fields of a request that the explorer has, too.

A request is an attrs class whose fields are `declared`. A command with such a request as its first argument, decorated
with `takes`, has an option for each field.
"""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import typer
from attrs import NOTHING, field, fields

from ..core.errors import RequestError

F = TypeVar("F", bound=Callable[..., Any])


def option(help: str, default: Any = None, *names: str, **more: Any) -> Any:
    """An option, as the default value of a command's argument; ``...`` as ``default`` if it has to be given."""
    return typer.Option(default, *names, help=help, show_default=default is not None and "parser" not in more, **more)


def argument(help: str, default: Any = None, **more: Any) -> Any:
    """An argument without a name, as the default value of a command's argument."""
    return typer.Argument(default, help=help, show_default=False, **more)


def flag(help: str, name: str) -> Any:
    """An option without a value."""
    return typer.Option(False, name, help=help)


def json_flag(help: str = "Print only JSON.") -> Any:
    """The flag ``--json``."""
    return flag(help, "--json")


def declared(
    help: str, default: Any = None, *names: str, choices: tuple[str, ...] = (), least: int | None = None, **more: Any
) -> Any:
    """A field of a request, with its option.

    Args:
        help, default, names, more: as of `option`.
        choices: the values that it may have; any if empty.
        least: its smallest value.
    """
    metadata = {"option": option(help, default, *names, **more), "choices": choices, "least": least}
    return field(default=NOTHING if default is ... else default, metadata=metadata)


def check_declared(request: Any) -> None:
    """Refuse values that are none of a field's choices, or below its least one: they may come from a page.

    Raises:
        RequestError: there is one.
    """
    for each in fields(type(request)):
        value, option = getattr(request, each.name), "--" + each.name.replace("_", "-")
        choices, least = each.metadata.get("choices"), each.metadata.get("least")
        if choices and value not in choices:
            raise RequestError(f"{option} is '{value}': give one of {', '.join(choices)}")
        if least is not None and value is not None and value < least:
            raise RequestError(f"{option} is {value}: give a whole number of at least {least}")


def takes(kind: type) -> Callable[[F], Callable[..., Any]]:
    """Decorate a command whose first argument is a request of this class: its options are the fields."""
    given = fields(kind)

    def decorated(command: F) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            request = kind(**{each.name: values.pop(each.name) for each in given})
            return command(request, **values)

        own = list(signature(command).parameters.values())[1:]
        options = [
            Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=each.metadata["option"], annotation=_text_or_type(each)
            )
            for each in given
        ]
        run.__signature__ = Signature(sorted([*options, *own], key=lambda each: each.kind))  # type: ignore[attr-defined]
        run.__doc__, run.__annotations__ = command.__doc__, {}
        return run

    return decorated


def _text_or_type(each: Any) -> Any:
    """The type of an option: a text, where it has a parser of its own."""
    return str | None if each.metadata["option"].parser is not None else each.type
