"""Whether a checkpoint fits a pipeline: checked before anything of the pipeline changes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.files.limits import short
from .reading import CheckpointReader
from .state_parts import Parts, state_of
from .training_state import TrainingState


def fitted(own: Parts, reader: CheckpointReader, training: TrainingState) -> Parts:
    """The parts that a pipeline loads: its own tensors, which are to be overwritten, and the checkpoint's items.

    Args:
        own: the pipeline's parts.
        reader: the checkpoint.
        training: the pipeline's state.

    Raises:
        RequestError: the checkpoint is of another model, optimizer or scheduler, or was not written by panpipe.
    """
    _check_sections(own, reader, training)
    for name, tensor in own.tensors.items():
        kept = reader.tensors.get(name)
        if kept is None:
            raise RequestError(f"the checkpoint has no tensor '{name}', which the pipeline has: {_OTHER}")
        if (kept.shape, kept.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise RequestError(
                f"'{name}' is {_text(kept.shape, kept.dtype)} in the checkpoint and "
                f"{_text(tensor.shape, tensor.dtype)} in the pipeline: {_OTHER}"
            )
    items = {}
    for name, item in own.items.items():
        if name not in reader.items:
            raise RequestError(f"the checkpoint has no '{name}', which the pipeline has: {_OTHER}")
        found = items[name] = reader.items[name]
        check_item(name, item, found)
        if isinstance(item, Tensor):
            items[name] = found.to(item.device)
    parts = Parts(own.tensors, items)
    training.packed(state_of(parts))
    return parts


def _check_sections(own: Parts, reader: CheckpointReader, training: TrainingState) -> None:
    """Refuse other classes and names with the messages of `TrainingState`, which name models and optimizers."""
    for name in ("scheduler", "scaler"):
        if name in reader.items:
            _check_class_and_state(name, reader.items[name])
    found = {name: reader.items[name] for name in ("scheduler",) if name in reader.items}
    optimizer = reader.items.get("progress.optimizer")
    training.check_classes({**found, "progress": {"optimizer": optimizer}})
    training.check({name: kept.shape for name, kept in reader.tensors.items()} | dict.fromkeys(reader.items))


_OTHER = "resume with the model and arguments that it was written with"


def _text(shape: object, dtype: object) -> str:
    return f"{dtype} of shape {tuple(shape)}"  # type: ignore[arg-type]


_COUNTS = ("progress.steps", "progress.updates", "progress.evaluations")


def check_item(name: str, own: Any, found: Any) -> None:
    """Refuse an item of another kind than the pipeline's own, so that nothing fails once it is loaded.

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
        _check_class_and_state(name, found)
    _check(name, own, found)


def _check_class_and_state(name: str, found: Any) -> None:
    """Refuse what is not a class name with a state: the items of schedulers and scalers."""
    if not (isinstance(found, tuple) and [type(each) for each in found] == [str, dict]):
        raise _refusal(name, "a class name and a state", found)


def _check(name: str, own: Any, found: Any) -> None:
    by_name = isinstance(own, Mapping) and all(isinstance(key, str) for key in own)
    if _is_number(own):
        wanted, right = "a number of 64 bits", _is_number(found)
    elif own is None:
        wanted, right = "a plain value", found is None or _is_number(found) or isinstance(found, bool | str)
    elif isinstance(own, bool):
        wanted, right = "true or false", found is None or isinstance(found, bool)
    elif isinstance(own, Tensor):
        wanted = f"a tensor, {_text(own.shape, own.dtype)}"
        right = isinstance(found, Tensor) and (own.shape, own.dtype) == (found.shape, found.dtype)
    elif isinstance(own, list | tuple):
        wanted, right = f"a list of {len(own)}", isinstance(found, list | tuple) and len(found) == len(own)
    elif by_name:
        wanted, right = "a dict", isinstance(found, Mapping)
    elif isinstance(own, Mapping):  # such as the milestones of MultiStepLR
        wanted = "a dict of numbers"
        right = isinstance(found, Mapping) and all(map(_is_number, (*found.keys(), *found.values())))
    else:
        wanted, right = f"a {type(own).__name__}", type(found) is type(own)
    if not right:
        raise _refusal(name, wanted, found)
    if by_name:
        _check_keys(name, own, found)
    elif isinstance(own, list | tuple):
        for place, (mine, there) in enumerate(zip(own, found, strict=True)):
            _check(f"{name}[{place}]", mine, there)


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


def _refusal(name: str, wanted: str, found: Any) -> RequestError:
    there = _text(found.shape, found.dtype) if isinstance(found, Tensor) else short(found)
    return RequestError(
        f"'{name[:200]}' is {there} in the checkpoint and must be {wanted}: it was written by another pipeline; "
        "resume with the arguments that it was written with"
    )
