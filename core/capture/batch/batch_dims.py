"""The dimension of each tensor of a batch that holds the samples, and the user's option for it: ``batch_dims=``."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from attrs import field, frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ...wording import first_of, shape_text
from ..values.containers import BatchNesting, flatten_batch, one_level

AUTO = "auto"
"""Value in ``batch_dims`` for dimensions that are found by tracing."""

SAMPLES = "samples"
"""Value in ``batch_dims`` for a list with an element for each sample."""


@frozen(slots=False, cache_hash=True)
class BatchDims:
    """The places of the samples in batches.

    Args:
        leaves: name of a leaf and its dimension with a row for each sample; None for a leaf that all samples share.
        lists: names of lists with an element for each sample.
    """

    leaves: tuple[tuple[str, int | None], ...]
    lists: frozenset[str] = field(factory=frozenset)

    @cached_property
    def by_name(self) -> dict[str, int | None]:
        """Name of a leaf → its dimension."""
        return dict(self.leaves)

    @classmethod
    def of(cls, leaves: Mapping[str, int | None], lists: frozenset[str] = frozenset()) -> "BatchDims":
        """From dimensions by name."""
        return cls(tuple(leaves.items()), lists)

    def knows(self, name: str) -> bool:
        """Whether a leaf's place is known."""
        return name in self.by_name or self.in_list(name)

    def in_list(self, name: str) -> bool:
        """Whether a leaf is part of a sample in a list."""
        return any(name.startswith(f"{one}[") for one in self.lists)


def read_batch_dims(given: Any, batch: Any) -> BatchDims:
    """The dimensions that a user gives.

    Args:
        given: a prefix of the batch's nesting, with a dimension for every tensor below, None for tensors that all
            microbatches share, or ``"samples"`` for a list with an element for each sample. Leaves that a dict omits,
            or with ``"auto"``, are not part of the result.
        batch: an example.

    Raises:
        RequestError: it does not fit the batch.
    """
    leaves, nesting = flatten_batch(batch)
    found: dict[str, int | None] = {}
    lists: set[str] = set()
    _read(given, nesting.plain(leaves), "batch", found, lists)
    return BatchDims.of(found, frozenset(lists))


def _read(given: Any, value: Any, name: str, found: dict[str, int | None], lists: set[str]) -> None:
    if isinstance(given, bool) or not (given is None or isinstance(given, int | str)):
        given_parts = _parts(given, name)
        parts = _children(value, name)
        if parts is None:
            raise RequestError(
                f"batch_dims has {given!r} for {name}, which is {_text(value)}: give a dimension or None"
            )
        unknown = [part for part in given_parts if part not in parts]
        if unknown or (not isinstance(given, Mapping) and len(parts) != len(given_parts)):
            what = unknown[0] if unknown else f"{len(given_parts)} entries for {name}"
            raise RequestError(f"batch_dims has {what}, and {name} has {first_of(list(parts), 8)}: use these names")
        for part, below in given_parts.items():
            _read(below, parts[part], part, found, lists)
    elif given == AUTO:
        return
    elif isinstance(given, str):
        if given != SAMPLES or type(value) not in (list, tuple):
            raise RequestError(
                f"batch_dims has {given!r} for {name}, which is {_text(value)}: give a dimension, None, or '{SAMPLES}' "
                "for a list with an element for each sample"
            )
        lists.add(name)
    else:
        keyed = pytree.tree_flatten_with_path(value)[0]
        for path, leaf in keyed:
            found[name + pytree.keystr(path)] = _checked(given, leaf, name + pytree.keystr(path))


def _checked(given: int | None, leaf: Any, name: str) -> int | None:
    """The dimension as a number from 0; values and tensors without dimensions are shared."""
    if given is None or not isinstance(leaf, Tensor) or not leaf.ndim:
        return None
    if not -leaf.ndim <= given < leaf.ndim:
        raise RequestError(
            f"batch_dims has {given} for {name}, which is {_text(leaf)}: give a dimension from {-leaf.ndim} to "
            f"{leaf.ndim - 1}, or None for a tensor that all microbatches share"
        )
    return given % leaf.ndim


def _parts(given: Any, name: str) -> dict[str, Any]:
    parts = _children(flatten_given(given), name)
    if parts is None:
        raise RequestError(
            f"batch_dims has {given!r} for {name}: give a dimension, None for what all microbatches share, "
            f"'{SAMPLES}' for a list with an element for each sample, or a container of these, nested as the batch is"
        )
    return parts


def flatten_given(given: Any) -> Any:
    """A container of dimensions in pytree containers."""
    leaves, nesting = flatten_batch(given)
    return nesting.plain(leaves)


def _children(value: Any, name: str) -> dict[str, Any] | None:
    level = one_level(value, name)
    return None if level is None else level[0]


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {shape_text(value.shape)}"
    return f"a {type(value).__name__}"


def tensors_by_name(leaves: list[Any], nesting: BatchNesting) -> dict[str, Tensor]:
    """The tensors of a batch that have dimensions, by name."""
    return {n: leaf for n, leaf in zip(nesting.names, leaves, strict=True) if isinstance(leaf, Tensor) and leaf.ndim}
