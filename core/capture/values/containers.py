"""Flattening of batches of any container class, and their restoration; results that are objects or dicts with a loss.

`torch.utils._pytree` supports dicts, lists, tuples, named tuples, and registered classes. Dataclasses, ``UserDict`` and
other mappings, such as the BatchEncoding of transformers, are handled here and not registered with pytree, because its
registry is global and a class can be registered only once.
"""

import copy
import dataclasses
import enum
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
class _Node:
    """A node of the nesting: an object, or a pytree container with objects somewhere below."""

    children: tuple["_Node | None", ...]
    object: _Object | None = None


@frozen
class BatchNesting:
    """How the leaves of a batch are nested; hashable, and equal for batches of one structure.

    Args:
        spec: with a dict in place of every object of a class that is not registered with pytree.
        node: the nesting of these objects; None if there are none.
    """

    spec: pytree.TreeSpec
    node: _Node | None = None

    def plain(self, leaves: Sequence[Any]) -> Any:
        """The batch in pytree containers."""
        return pytree.tree_unflatten(list(leaves), self.spec)

    def restored(self, plain: Any) -> Any:
        """The batch in the user's containers, from one in pytree containers."""
        return plain if self.node is None else _restored(plain, self.node)

    def batch(self, leaves: Sequence[Any]) -> Any:
        """The batch in the user's containers."""
        return self.restored(self.plain(leaves))

    @property
    def names(self) -> tuple[str, ...]:
        """A name for every leaf, such as ``batch['x']``."""
        paths = pytree.tree_flatten_with_path(self.plain(range(self.spec.num_leaves)))[0]
        return tuple(f"batch{pytree.keystr(path)}" for path, _ in paths)


def flatten_batch(batch: Any) -> tuple[list[Any], BatchNesting]:
    """The leaves and the nesting of a batch.

    Args:
        batch: any nesting of tensors and plain values in dicts, lists, tuples, named tuples, dataclasses, mappings, and
            classes that are registered with pytree.

    Raises:
        RequestError: it holds something else.
    """
    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_packed)
    if all(isinstance(leaf, _VALUES) for leaf in leaves):
        return leaves, BatchNesting(spec)
    plain, node = _plain(batch, "batch")
    leaves, spec = pytree.tree_flatten(plain)
    return leaves, BatchNesting(spec, node)


def _plain(value: Any, name: str) -> tuple[Any, _Node | None]:
    if isinstance(value, _VALUES):
        return value, None
    if _is_packed(value):
        raise RequestError(
            f"{name} is a PackedSequence, which has the values of all samples in one dimension: give the padded tensor "
            "and the lengths (torch.nn.utils.rnn.pad_packed_sequence), and pack them in the step or a module"
        )
    fields = _fields(value)
    if fields is not None:
        parts = {key: _plain(part, f"{name}[{key!r}]") for key, part in fields.items()}
        node = _Node(tuple(child for _, child in parts.values()), _Object(type(value), value))
        return {key: part for key, (part, _) in parts.items()}, node
    level = one_level(value, name)
    if level is None:
        raise RequestError(_unknown(value, name))
    children, spec = level
    found = [_plain(child, place) for place, child in children.items()]
    nodes = tuple(node for _, node in found)
    return pytree.tree_unflatten([part for part, _ in found], spec), _Node(nodes) if any(nodes) else None


def _restored(plain: Any, node: _Node) -> Any:
    children, spec = pytree.tree_flatten(plain, is_leaf=lambda part: part is not plain)
    parts = [c if n is None else _restored(c, n) for c, n in zip(children, node.children, strict=True)]
    made = pytree.tree_unflatten(parts, spec)
    return made if node.object is None else node.object.filled(made)


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
    """The fields of an object whose class is not registered with pytree; None if it is, or has no fields."""
    if type(value) in pytree.SUPPORTED_NODES:
        return None
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
