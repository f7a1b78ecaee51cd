"""The storages that operators save for the backward, each counted at the first operator that saves it.

In place of casts to a narrower dtype (``programs/recomputed.narrow_casts``) and of wide tensors (``wide_tensors``) that
a stage's backward computes again there is what they are computed from. Operators are not divided into stages yet: a cut
between an operator that casts and what its input is computed from is not expected, because both would be sent.
"""

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from ..capture.graph.nodes import root_of
from ..capture.programs.recomputed import LEAST_BYTES, MOST_NARROW, MOST_WIDE
from .single_operator import LoneOperator, narrowed
from .work import Origin, TracedOperator

Place = tuple[int, int]
"""An operator's index, and the number of one of the storages that it is the first to save."""


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


def saved_storages(
    lone: Sequence[LoneOperator], works: Sequence[TracedOperator], plain: Collection[str] = ()
) -> list[list[Storage]]:
    """The storages that each operator is the first to save.

    Args:
        plain: names of operators that save what autograd saves: nothing is computed again.
    """
    places = {(i, at): each for i, own in enumerate(_first_saved(lone, works)) for at, each in enumerate(own)}
    kept = {each.name for each in places.values() if each.name is not None}
    left = {
        place: each
        for place, each in places.items()
        if lone[place[0]].name in plain or each.cast is None or not _follows(each.cast, lone, works, kept)
    }
    narrow = _narrow_sources(lone, works, left)
    narrow = {place: sources for place, sources in narrow.items() if lone[place[0]].name not in plain}
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


def _follows(name: str, lone: Sequence[LoneOperator], works: Sequence[TracedOperator], kept: Collection[str]) -> bool:
    """Whether operators that work along rows compute a node from kept ones and from inputs of the step."""
    place = {operator.name: i for i, operator in enumerate(lone)}
    seen: set[int] = set()
    todo = [name]
    while todo:
        name = todo.pop()
        owner = lone[0].operators.owner.get(name)
        if name in kept or owner is None or place[owner] in seen:
            continue
        if not works[place[owner]].row_wise:
            return False
        seen.add(place[owner])
        todo.extend(root_of(node).name for node in lone[place[owner]].given)
    return len(seen) < MOST_NARROW


def _narrow_sources(
    lone: Sequence[LoneOperator], works: Sequence[TracedOperator], saved: Mapping[Place, Storage]
) -> dict[Place, dict[str, int]]:
    """What is saved in place of wide tensors that the backward computes again: name of a node → bytes."""
    values, owner = lone[0].operators.values, lone[0].operators.owner
    place = {operator.name: i for i, operator in enumerate(lone)}
    held, locked = {each.name for each in saved.values() if each.name is not None}, set[str | None]()
    found: dict[Place, dict[str, int]] = {}

    def sources(operator: int, tensor: Storage) -> set[str] | None:
        """The narrow tensors that it follows from, with what is saved; None if it does not."""
        narrow, steps, seen = set[str](), 0, set[int]()
        todo: list[str | None] = [tensor.name]
        if tensor.origin is not None:
            given = lone[operator].given
            narrow |= {root_of(given[i]).name for i in tensor.origin.narrow}
            steps, todo = tensor.origin.steps, [root_of(given[i]).name for i in tensor.origin.reads]
        while todo:
            name = todo.pop()
            if name is None:
                return None
            if (name in held and name != tensor.name) or name not in owner or place[owner[name]] in seen:
                continue
            work = works[place[owner[name]]]
            if work.origin is None:
                return None
            seen.add(place[owner[name]])
            steps += work.origin.steps
            given = lone[place[owner[name]]].given
            narrow |= {root_of(given[i]).name for i in work.origin.narrow}
            todo.extend(root_of(given[i]).name for i in work.origin.reads)
        return narrow if narrow and steps <= MOST_WIDE else None

    for at, tensor in saved.items():
        read = None if tensor.shared or tensor.name in locked else sources(at[0], tensor)
        if read is None:
            continue
        new = {name: int(values[name].untyped_storage().nbytes()) for name in sorted(read - held)}
        if sum(new.values()) + LEAST_BYTES <= tensor.bytes:
            found[at] = new
            held = held - {tensor.name or ""} | read
            locked |= read
    return found
