"""The arguments of an operator's call by the names in its schema, and those that the operator writes in place."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..values.nesting import tensors_of


def arguments_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults; those given by keyword alone if the target has no schema.

    Args:
        target: the overload that is called, or a Python function.
        args, kwargs: tensors, or nodes of a graph.
    """
    schema = getattr(target, "_schema", None)
    parameters = schema.arguments if schema is not None else ()
    named = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    return {**named, **dict(zip((parameter.name for parameter in parameters), args, strict=False)), **kwargs}


def written_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes in place, by its schema; an argument may be a list.

    Args:
        target, args, kwargs: as of `arguments_by_name`.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        args[position] if position < len(args) else kwargs.get(parameter.name)
        for position, parameter in enumerate(schema.arguments)
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]


def written_tensors(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes in place; arguments as of `arguments_by_name`."""
    return tensors_of(written_values(target, args, kwargs))
