"""What a user says of the dimensions of a batch: which hold the samples (``batch_dims=``), and which vary
(``dynamic=``). Both options are a prefix of the batch's nesting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ...wording import first_of, shape_text
from ..values.containers import BatchNesting, flatten_batch, one_level

AUTO = "auto"
"""Value in ``batch_dims`` for dimension 0, as without it."""

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
    found: dict[str, int | None] = {}
    lists: set[str] = set()
    for each, value, name in _matched("batch_dims", given, batch, lambda given, _: given is None or _plain(given)):
        if isinstance(each, str) and each != AUTO:
            if each != SAMPLES or type(value) not in (list, tuple):
                raise RequestError(
                    f"batch_dims has {each!r} for {name}, which is {_text(value)}: give a dimension, None, or "
                    f"'{SAMPLES}' for a list with an element for each sample"
                )
            lists.add(name)
        elif each != AUTO:
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                found[name + pytree.keystr(path)] = _checked(each, leaf, name + pytree.keystr(path))
    return BatchDims.of(found, frozenset(lists))


def _plain(given: Any) -> bool:
    return isinstance(given, int | str) and not isinstance(given, bool)


def read_dynamic(given: Any, batch: Any) -> dict[str, dict[int, int | None]]:
    """The dimensions that a user declares to vary: name of a tensor → dimension → its largest size; None without.

    Args:
        given: a prefix of the batch's nesting, with a dimension, several, or a dict from dimension to its largest size
            or None, for every tensor below; None for tensors whose sizes do not vary.
        batch: an example.

    Raises:
        RequestError: it does not fit the batch.
    """
    found: dict[str, dict[int, int | None]] = {}

    def is_leaf(given: Any, value: Any) -> bool:
        return given is None or _plain(given) or isinstance(value, Tensor) or _sizes_alone(given, value)

    for each, value, name in _matched("dynamic", given, batch, is_leaf):
        for path, leaf in pytree.tree_flatten_with_path(value)[0] if each is not None else ():
            if isinstance(leaf, Tensor):
                found[name + pytree.keystr(path)] = _varying(each, leaf, name + pytree.keystr(path))
    return found


def _sizes_alone(given: Any, value: Any) -> bool:
    """Whether a dict has dimensions for the tensors of a container, and not the names of its parts."""
    names = value if isinstance(value, Mapping) else ()
    return isinstance(given, Mapping) and all(type(key) is int and key not in names for key in given)


def _varying(given: Any, leaf: Tensor, name: str) -> dict[int, int | None]:
    largest = (
        given if isinstance(given, Mapping) else dict.fromkeys(given if isinstance(given, tuple | list) else [given])
    )
    found: dict[int, int | None] = {}
    for dim, most in largest.items():
        if type(dim) is not int or not -leaf.ndim <= dim < leaf.ndim:
            raise RequestError(
                f"dynamic has {dim!r} for {name}, which is {_text(leaf)}: give a dimension from {-leaf.ndim} to "
                f"{leaf.ndim - 1}, several, a dict from dimension to its largest size, or None"
            )
        size = leaf.shape[dim]
        if most is not None and (type(most) is not int or most < size):
            raise RequestError(
                f"dynamic has {most!r} as the largest size of dimension {dim} of {name}, which is {size} in the "
                f"example: give a whole number of at least {size}, or None"
            )
        found[dim % leaf.ndim] = most
    return found


def enlarged(batch: Any, dynamic: Mapping[str, Mapping[int, int | None]]) -> Any:
    """A batch of the largest declared sizes: its tensors repeat their entries along these dimensions."""
    leaves, nesting = flatten_batch(batch)
    for i, name in enumerate(nesting.names):
        for dim, most in dynamic.get(name, {}).items():
            if most is not None and most > leaves[i].shape[dim] > 0:
                entries = torch.arange(most, device=leaves[i].device) % leaves[i].shape[dim]
                leaves[i] = leaves[i].index_select(dim, entries)
    return nesting.batch(leaves)


def _matched(
    option: str, given: Any, batch: Any, is_leaf: Callable[[Any, Any], bool]
) -> Iterator[tuple[Any, Any, str]]:
    """The values of a prefix of a batch, with the parts of the batch that they are for, and the names of these.

    Args:
        option: its name, for messages.
        given, batch: the prefix, and the batch.
        is_leaf: whether a part of the prefix is such a value, for a part of the batch.
    """
    (given_leaves, given_nesting), (leaves, nesting) = flatten_batch(given, option), flatten_batch(batch)
    waiting = [(given_nesting.plain(given_leaves), nesting.plain(leaves), "batch")]
    while waiting:
        each, value, name = waiting.pop(0)
        if is_leaf(each, value):
            yield each, value, name
            continue
        prefix, level = one_level(each, name), one_level(value, name)
        if prefix is None:
            raise RequestError(
                f"{option} has {each!r} for {name}: give a dimension, None, or a container of these, nested as the "
                "batch is; see panpipe.pipeline for what else it may have"
            )
        if level is None:
            raise RequestError(f"{option} has {each!r} for {name}, which is {_text(value)}: give a dimension or None")
        unknown = [part for part in prefix[0] if part not in level[0]]
        if unknown or (not isinstance(each, Mapping) and len(level[0]) != len(prefix[0])):
            what = unknown[0] if unknown else f"{len(prefix[0])} entries for {name}"
            raise RequestError(f"{option} has {what}, and {name} has {first_of(list(level[0]), 8)}: use these names")
        waiting[:0] = [(below, level[0][part], part) for part, below in prefix[0].items()]


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


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {shape_text(value.shape)}"
    return f"a {type(value).__name__}"


def place_samples(batch: Any, given: Any = AUTO, microbatches: int = 2) -> BatchDims:
    """The places of the samples by one rule: in dimension 0 of every tensor, or where the user says.

    All microbatches share Python values, tensors without dimensions, and tensors with one row in a batch of several
    samples, which no microbatch could have a part of, such as position numbers of shape (1, T). A list of dicts or
    tuples that have a tensor each, alike, is a list of samples if it has as many elements as other tensors have rows;
    so is a list of tensors whose own rows do not fit.

    Args:
        batch: an example.
        given: the user's ``batch_dims``, or known `BatchDims` of some leaves.
        microbatches: number of parts that the batch is cut into; with one, tensors of other sizes are shared.

    Raises:
        RequestError: ``given`` does not fit, or tensors have different numbers of rows.
    """
    found, rows = readings(batch, given)
    if found:
        return found[0]
    if not rows:
        raise RequestError("the batch holds no tensor with rows: give tensors with a batch dimension")
    if microbatches == 1:  # nothing is cut
        known = given if isinstance(given, BatchDims) else read_batch_dims(given, batch)
        names = flatten_batch(batch)[1].names
        most = max(rows.values(), key=list(rows.values()).count)
        return BatchDims.of({n: known.by_name.get(n, 0 if rows.get(n) == most else None) for n in names})
    texts = [f"{first_of([n for n in rows if rows[n] == size], 3)} ({size})" for size in dict.fromkeys(rows.values())]
    raise DifferentRows(
        f"samples are in dimension 0 of every tensor, but its size is not the same in {', '.join(texts[:8])}"
    )


def readings(batch: Any, given: Any) -> tuple[list[BatchDims], dict[str, int]]:
    """The places that fit the sizes, with lists of samples and without, the first by the rule of `place_samples`; and
    name of a tensor → its number of rows."""
    known = given if isinstance(given, BatchDims) else read_batch_dims(given, batch)
    leaves, nesting = flatten_batch(batch)
    if all(known.knows(name) for name in nesting.names):
        return [known], {}
    tensors = tensors_by_name(leaves, nesting)
    lists = {n: e for n, e in _lists_of_samples(nesting.plain(leaves), "batch").items() if n not in known.lists}
    lists = {n: e for n, e in lists.items() if not any(name.startswith(f"{n}[") for name in known.by_name)}
    found: list[BatchDims] = []
    for of_lists in dict.fromkeys((known.lists, known.lists | frozenset(lists))):
        inside = BatchDims((), of_lists)
        dims = {n: known.by_name.get(n, 0) for n in tensors if not inside.in_list(n)}
        rows = {n: tensors[n].shape[d] for n, d in dims.items() if d is not None}
        counts = {n: len(elements) for n, elements in lists.items() if n in of_lists}
        single = {n for n, size in rows.items() if size == 1 and not known.knows(n)}
        sizes = {size for n, size in (rows | counts).items() if n not in single}
        if len(sizes) <= 1 and (rows or of_lists):
            shared = single if sizes else set()
            names = [n for n in nesting.names if not inside.in_list(n)]
            found.append(BatchDims.of({n: None if n in shared else dims.get(n) for n in names}, of_lists))
    if lists and not any(isinstance(elements[0], Tensor) for elements in lists.values()):
        found.reverse()
    return found, {name: tensor.shape[0] for name, tensor in tensors.items()}


class DifferentRows(RequestError):
    """Tensors of a batch have different sizes of dimension 0, and the user does not say where the samples are."""


def tensors_by_name(leaves: Sequence[Any], nesting: BatchNesting) -> dict[str, Tensor]:
    """The tensors of a batch that have dimensions, by name."""
    return {n: leaf for n, leaf in zip(nesting.names, leaves, strict=True) if isinstance(leaf, Tensor) and leaf.ndim}


def _lists_of_samples(batch: Any, name: str) -> dict[str, Sequence[Any]]:
    """Lists whose elements are nested alike, with tensors of the same dtypes and numbers of dimensions."""
    if type(batch) in (list, tuple) and len(batch) > 1 and len({_kind(one) for one in batch}) == 1 and _kind(batch[0]):
        return {name: batch}
    level = one_level(batch, name)
    found: dict[str, Sequence[Any]] = {}
    for place, part in level[0].items() if level is not None else ():
        found |= _lists_of_samples(part, place)
    return found


def _kind(element: Any) -> Any:
    """The common structure of a list's elements, if they are samples; None without a tensor."""
    leaves, nesting = flatten_batch(element)
    tensors = [(leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return (nesting, tuple(tensors)) if any(isinstance(leaf, Tensor) for leaf in leaves) else None


def with_lists(
    leaves: Sequence[Any], nesting: BatchNesting, lists: frozenset[str], take: Callable[[list[Any]], list[Any]]
) -> tuple[list[Any], BatchNesting]:
    """A batch with other elements in some of its lists.

    Args:
        leaves, nesting: the batch.
        lists: names of the lists.
        take: the present elements of a list → its new elements.
    """
    return flatten_batch(_relisted(nesting.batch(leaves), "batch", lists, take))


def _relisted(value: Any, name: str, lists: frozenset[str], take: Callable[[list[Any]], list[Any]]) -> Any:
    if isinstance(value, Tensor):  # a batch may have a tensor in place of the example's list
        return value
    if name in lists:
        return type(value)(take(list(value)))
    if not any(other.startswith(name) for other in lists):
        return value
    leaves, nesting = flatten_batch(value)
    if nesting.spec.is_leaf() and nesting.objects and nesting.objects[0] is not None:
        fields = nesting.plain(leaves)
        parts = {key: _relisted(_field(value, key), f"{name}[{key!r}]", lists, take) for key in fields}
        return nesting.objects[0][0].filled(parts)
    level = one_level(value, name)
    if level is None:
        return value
    held, spec = level
    return pytree.tree_unflatten([_relisted(part, place, lists, take) for place, part in held.items()], spec)


def _field(value: Any, key: str) -> Any:
    return value[key] if isinstance(value, Mapping) else getattr(value, key)
