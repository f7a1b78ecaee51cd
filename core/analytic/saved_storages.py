"""The storages that operators save for the backward, each counted at the first operator that saves it."""

from collections.abc import Sequence

from attrs import frozen

from ..capture.graph.nodes import root_of
from .recomputed import WideTensor, casts_computed_again, narrow_sources
from .single_operator import LoneOperator, narrowed
from .work import Origin, TracedOperator


@frozen
class Storage:
    """A storage that an operator is the first to save.

    Args:
        name: the node that allocates it; None if no other operator receives it.
        bytes: of it.
        shared: whether all microbatches share it.
        cast: name of the node of which it is a cast; None if it is none.
        origin: what it is computed from within the operator; None if it is an input or a result.
    """

    name: str | None
    bytes: int
    shared: bool
    cast: str | None = None
    origin: Origin | None = None


def saved_storages(lone: Sequence[LoneOperator], works: Sequence[TracedOperator]) -> list[list[Storage]]:
    """The storages that each operator is the first to save.

    In place of one that the backward computes again there is what it is computed from.

    Args:
        lone: the operators, in the graph's order.
        works: their work.
    """
    found = _first_saved(lone, works)
    kept = {each.name for own in found for each in own if each.name is not None}
    places = {(number, at): each for number, own in enumerate(found) for at, each in enumerate(own)}
    casts = {place: each.cast for place, each in places.items() if each.cast is not None}
    again = casts_computed_again(lone, works, kept, casts)
    left = {place: each for place, each in places.items() if place not in again}
    wide = {
        place: WideTensor(place[0], each.name, each.bytes, each.origin)
        for place, each in left.items()
        if not each.shared
    }
    held = {each.name for each in left.values() if each.name is not None}
    narrow = narrow_sources(lone, works, held, wide)
    chosen: list[list[Storage]] = [[] for _ in lone]
    for place, each in left.items():
        sources = narrow.get(place)
        chosen[place[0]] += (
            [each] if sources is None else [Storage(name, size, shared=False) for name, size in sources.items()]
        )
    return chosen


def _first_saved(lone: Sequence[LoneOperator], works: Sequence[TracedOperator]) -> list[list[Storage]]:
    """Per operator the storages that it saves and no earlier operator does."""
    kept: set[str] = set()
    found = list[list[Storage]]()
    for operator, work in zip(lone, works, strict=True):
        own: list[Storage] = []
        for tensor in work.kept:
            node = operator.given[tensor.given] if tensor.given is not None else None
            node = operator.returned[tensor.returned] if tensor.returned is not None else node
            root = None if node is None else root_of(node)
            if root is not None and root.op == "placeholder" and tensor.shared:
                continue  # a view of a parameter
            name = None if root is None else root.name
            if name is None or name not in kept:
                source = operator.given[tensor.cast_of] if tensor.cast_of is not None else narrowed(operator, root)
                if source is not None and source.name not in operator.operators.owner:
                    source = None  # an input of the step
                cast = None if source is None else root_of(source).name
                own.append(Storage(name, tensor.bytes, tensor.shared, cast, tensor.origin if name is None else None))
            if name is not None:
                kept.add(name)
        found.append(own)
    return found
