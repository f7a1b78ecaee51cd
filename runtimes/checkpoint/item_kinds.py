"""Checks that a checkpoint's items have the types of the pipeline's own, so that nothing fails once they are loaded."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...core.errors import RequestError

_COUNTS = ("progress.steps", "progress.updates", "progress.evaluations")


def check_item(name: str, own: Any, found: Any) -> None:
    """Refuse an item of another kind than the pipeline's own.

    Args:
        name: of the item.
        own: the pipeline's.
        found: the checkpoint's.

    Raises:
        RequestError: it is of another kind, or a number is out of range.
    """
    counted = name in _COUNTS or (name.startswith("ema.") and name.endswith(".updates"))
    if counted and (type(found) is not int or not 0 <= found < 1 << 63):
        raise _refusal(name, "a number of steps from 0 to 2⁶³", found)
    if name == "progress.seed" and (type(found) is not int or not -(1 << 64) < found < 1 << 64):
        raise _refusal(name, "a seed of 64 bits", found)
    if name in ("scheduler", "scaler"):
        check_class_and_state(name, found)
    _check(name, own, found)


def check_class_and_state(name: str, found: Any) -> None:
    """Refuse what is not a class name with a state: the items of schedulers and scalers."""
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not isinstance(found[0], str) or not isinstance(found[1], dict):
        raise _refusal(name, "a class name and a state", found)


def _check(name: str, own: Any, found: Any) -> None:
    wanted = _lacking(own, found)
    if wanted is not None:
        raise _refusal(name, wanted, found)
    if isinstance(own, Mapping) and all(isinstance(key, str) for key in own):
        _check_keys(name, own, found)
    elif isinstance(own, list | tuple):
        for place, (mine, there) in enumerate(zip(own, found, strict=True)):
            _check(f"{name}[{place}]", mine, there)


def _lacking(own: Any, found: Any) -> str | None:
    """What the found value must be and is not; None if it is of the kind of the own one."""
    for matches, wanted, accepts in _RULES:
        if matches(own):
            return None if accepts(own, found) else wanted(own)
    return None if type(found) is type(own) else f"a {type(own).__name__}"


def _check_keys(name: str, own: Mapping[str, Any], found: Mapping[Any, Any]) -> None:
    other = next((key for key in (*own, *found) if (key in own) != (key in found)), None)
    if other is not None:
        side = "the checkpoint lacks" if other in own else "the pipeline lacks"
        raise RequestError(
            f"'{name}' of the checkpoint is of another version or kind: {side} {str(other)[:100]!r}; resume with the "
            "versions and arguments that it was written with"
        )
    for key, mine in own.items():
        _check(f"{name}.{key}", mine, found[key])


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 64)


def _of_numbers(found: Any) -> bool:
    return isinstance(found, Mapping) and all(map(_is_number, (*found.keys(), *found.values())))


_Rule = tuple[Callable[[Any], bool], Callable[[Any], str], Callable[[Any, Any], bool]]
_RULES: tuple[_Rule, ...] = (
    (_is_number, lambda own: "a number of 64 bits", lambda own, found: _is_number(found)),
    (
        lambda own: own is None,
        lambda own: "a plain value",
        lambda own, found: found is None or _is_number(found) or isinstance(found, bool | str),
    ),
    (
        lambda own: isinstance(own, bool),
        lambda own: "true or false",
        lambda own, found: found is None or isinstance(found, bool),
    ),
    (
        lambda own: isinstance(own, Tensor),
        lambda own: f"a tensor of shape {tuple(own.shape)} and {own.dtype}",
        lambda own, found: isinstance(found, Tensor) and (own.shape, own.dtype) == (found.shape, found.dtype),
    ),
    (
        lambda own: isinstance(own, list | tuple),
        lambda own: f"a list of {len(own)}",
        lambda own, found: isinstance(found, list | tuple) and len(found) == len(own),
    ),
    (
        lambda own: isinstance(own, Mapping) and all(isinstance(key, str) for key in own),
        lambda own: "a dict",
        lambda own, found: isinstance(found, Mapping),
    ),
    # such as the milestones of MultiStepLR
    (lambda own: isinstance(own, Mapping), lambda own: "a dict of numbers", lambda own, found: _of_numbers(found)),
)
"""Whether a rule is for the own value, what a found value must be, and whether it is that."""


def _refusal(name: str, wanted: str, found: Any) -> RequestError:
    return RequestError(
        f"'{name[:200]}' is {_text(found)} in the checkpoint and must be {wanted}: it was written by another pipeline; "
        "resume with the arguments that it was written with"
    )


def _text(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)} and {found.dtype}"
    if isinstance(found, bool | float) or found is None or (isinstance(found, int) and abs(found) < 1 << 64):
        return repr(found)
    if isinstance(found, int):
        return f"an integer of {found.bit_length()} bits"
    return f"a {type(found).__name__} of {len(found)}" if hasattr(found, "__len__") else f"a {type(found).__name__}"
