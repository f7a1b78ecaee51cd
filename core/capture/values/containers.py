"""Flattening of batches of any container class, and their restoration; results that are objects or dicts with a loss.

`torch.utils._pytree` supports dicts, lists, tuples, named tuples, and registered classes. Dataclasses, ``UserDict`` and
other mappings, such as the BatchEncoding of transformers, are handled here and not registered with pytree, because its
registry is global and a class can be registered only once.
"""

import copy
import dataclasses
import enum
import itertools
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ...errors import RequestError

_VALUES = (
    Tensor, bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type(None), slice,
)  # fmt: skip
"""Classes of leaves: tensors, and values that are compared by equality."""


@frozen
class _Object:
    """A container of a class that is not registered with pytree.

    Args:
        kind: its class.
        prototype: an object of the class; attributes that are not fields are copied from it.
    """

    kind: type
    prototype: Any = field(eq=False, repr=False)

    def filled(self, fields: Mapping[str, Any]) -> Any:
        """An object of the class with these fields; constructors do not run."""
        made = copy.copy(self.prototype)
        if isinstance(made, UserDict):
            made.data = dict(fields)
        elif dataclasses.is_dataclass(made) and not isinstance(made, Mapping):
            for name, value in fields.items():
                object.__setattr__(made, name, value)
        elif isinstance(made, MutableMapping):
            for name, value in fields.items():
                made[name] = value
        else:
            made = self.kind(fields)
        return made


@frozen
class BatchNesting:
    """How the leaves of a batch are nested; hashable, and equal for batches of one structure.

    Args:
        spec: of the pytree containers.
        objects: for each of their leaves that is an object of a class that is not registered with pytree: the object,
            and the nesting of its fields; None for a leaf. Empty if there are none.
    """

    spec: pytree.TreeSpec
    objects: "tuple[tuple[_Object, BatchNesting] | None, ...]" = ()

    def plain(self, leaves: Sequence[Any]) -> Any:
        """The batch in pytree containers, with a dict in place of every object."""
        return self._filled(iter(leaves), plain=True)

    def batch(self, leaves: Sequence[Any]) -> Any:
        """The batch in the user's containers."""
        return self._filled(iter(leaves), plain=False)

    def _filled(self, leaves: Iterator[Any], plain: bool) -> Any:
        parts: list[Any] = []
        for held in self.objects or (None,) * self.spec.num_leaves:
            if held is None:
                parts.append(next(leaves))
            else:
                fields = held[1]._filled(leaves, plain)
                parts.append(fields if plain else held[0].filled(fields))
        return pytree.tree_unflatten(parts, self.spec)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for every leaf, such as ``batch['x']``."""
        paths = pytree.tree_flatten_with_path(self.plain(itertools.count()))[0]  # type: ignore[arg-type]
        return tuple(f"batch{pytree.keystr(path)}" for path, _ in paths)


def flatten_batch(batch: Any, name: str = "batch") -> tuple[list[Any], BatchNesting]:
    """The leaves and the nesting of a batch.

    Args:
        batch: any nesting of tensors and plain values in dicts, lists, tuples, named tuples, dataclasses, mappings, and
            classes that are registered with pytree.
        name: of the batch, for messages.

    Raises:
        RequestError: it holds something else.
    """
    flat, spec = pytree.tree_flatten(batch, is_leaf=_is_packed)
    if all(isinstance(leaf, _VALUES) for leaf in flat):
        return flat, BatchNesting(spec)
    leaves, objects = list[Any](), list[tuple[_Object, BatchNesting] | None]()
    for path, leaf in pytree.tree_flatten_with_path(batch, is_leaf=_is_packed)[0]:
        if isinstance(leaf, _VALUES):
            leaves.append(leaf)
            objects.append(None)
            continue
        place = name + pytree.keystr(path)
        if (fields := _fields(leaf)) is None:
            raise RequestError(_unknown(leaf, place))
        inner, nesting = flatten_batch(dict(fields), place)
        leaves += inner
        objects.append((_Object(type(leaf), leaf), nesting))
    return leaves, BatchNesting(spec, tuple(objects))


def one_level(value: Any, name: str) -> tuple[dict[str, Any], pytree.TreeSpec] | None:
    """The children of a pytree container by name, and its structure; None for a leaf.

    Args:
        value: the container, or a leaf.
        name: of the value; the names of its children start with it.
    """
    keyed, spec = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    return {name + pytree.keystr(path): part for path, part in keyed}, spec


def _fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of an object whose class is not registered with pytree; None if it has no fields."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _unknown(value: Any, name: str) -> str:
    kind = type(value)
    if _is_packed(value):
        return (
            f"{name} is a PackedSequence, which has the values of all samples in one dimension: give the padded tensor "
            "and the lengths (torch.nn.utils.rnn.pad_packed_sequence), and pack them in the step or a module"
        )
    if kind.__module__ == "numpy":
        return f"{name} is a numpy {kind.__name__}: a batch holds tensors; convert it with torch.as_tensor"
    if isinstance(value, Iterator | DataLoader | Dataset):
        return f"{name} is a {kind.__qualname__} and not a batch: give one batch of it, such as next(iter(loader))"
    return (
        f"{name} is a {kind.__module__}.{kind.__qualname__}, whose tensors are unknown: make it a dict, a dataclass or "
        "a named tuple, or register its class with torch.utils._pytree.register_pytree_node"
    )


def plain_result(result: Any) -> Any:
    """A step's result with an object or dict that has a ``loss`` replaced by the loss and its other scalars as metrics.

    Tensors with several elements, such as logits, are not part of a step's result. Other results are unchanged.

    Args:
        result: what a step returned.
    """
    fields: Mapping[Any, Any] = {}
    if isinstance(result, Mapping):
        fields = result
    elif dataclasses.is_dataclass(result):
        fields = {one.name: getattr(result, one.name, None) for one in dataclasses.fields(result)}
    elif isinstance(result, tuple) and hasattr(result, "_asdict"):
        fields = result._asdict()
    if fields.get("loss") is None:
        return result
    metrics = {str(name): value for name, value in fields.items() if name != "loss" and _is_scalar(value)}
    return (fields["loss"], metrics) if metrics else fields["loss"]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def shared_texts(leaves: Sequence[Any], nesting: BatchNesting) -> str:
    """What to do where texts belong to samples, to end the message of a step that fails; "" without texts."""
    name = next((name for name, leaf in zip(nesting.names, leaves, strict=True) if isinstance(leaf, str)), None)
    if name is None:
        return ""
    return (
        f"; all microbatches share the texts of the batch, such as {name}: give texts of samples as tensors of numbers "
        "with a row for each sample, or microbatches=1"
    )
