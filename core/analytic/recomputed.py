"""Saved tensors that the backward of a stage computes again, found operator by operator: casts to a narrower dtype
(`recomputed.narrow_casts`), and wide tensors (`recomputed.wide_tensors`).

A stage computes them again from what it saves. Operators are not divided into stages yet: a cut between an operator
that casts and what its input is computed from is not expected, because both would be sent.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from attrs import frozen

from ..capture.graph.nodes import root_of
from ..capture.programs.recomputed import LEAST_BYTES, MOST_NARROW, MOST_WIDE
from .single_operator import LoneOperator
from .work import Origin, TracedOperator

Place = TypeVar("Place")


@frozen
class WideTensor:
    """A saved tensor that might be computed again from narrow ones.

    Args:
        operator: index of the operator that saves it.
        name: the node that allocates it; None if no other operator receives it.
        bytes: of its storage.
        origin: what it is computed from within the operator; None if it is an input or a result.
    """

    operator: int
    name: str | None
    bytes: int
    origin: Origin | None


def casts_computed_again(
    lone: Sequence[LoneOperator],
    works: Sequence[TracedOperator],
    saved: Collection[str],
    casts: Mapping[Place, str],
) -> set[Place]:
    """The casts whose sources follow from saved values.

    Args:
        lone: the operators.
        works: their work.
        saved: names of the nodes whose memory is saved.
        casts: place of a saved cast → name of the node that is cast.
    """
    place = {operator.name: i for i, operator in enumerate(lone)}

    def follows(name: str) -> bool:
        """Whether operators that work along rows compute a node from saved ones and from inputs of the step."""
        seen: set[int] = set()
        todo = [name]
        while todo:
            name = todo.pop()
            owner = lone[0].operators.owner.get(name)
            if name in saved or owner is None or place[owner] in seen:
                continue
            if not works[place[owner]].row_wise:
                return False
            seen.add(place[owner])
            todo.extend(root_of(node).name for node in lone[place[owner]].given)
        return len(seen) < MOST_NARROW

    return {at for at, name in casts.items() if follows(name)}


def narrow_sources(
    lone: Sequence[LoneOperator],
    works: Sequence[TracedOperator],
    saved: Collection[str],
    wide: Mapping[Place, WideTensor],
) -> dict[Place, dict[str, int]]:
    """What is saved in place of tensors that the backward computes again: name of a node → bytes.

    Args:
        lone: the operators.
        works: their work.
        saved: names of the nodes whose memory is saved.
        wide: place of a saved tensor → what it is; in the order of the operators.
    """
    values, owner = lone[0].operators.values, lone[0].operators.owner
    place = {operator.name: i for i, operator in enumerate(lone)}
    held, locked = set(saved), set[str]()
    found: dict[Place, dict[str, int]] = {}

    def sources(tensor: WideTensor) -> set[str] | None:
        """The narrow tensors that it follows from, with what is saved; None if it does not."""
        origin = tensor.origin
        narrow, steps, todo = set[str](), 0, [tensor.name]
        if origin is not None:
            given = lone[tensor.operator].given
            narrow |= {root_of(given[i]).name for i in origin.narrow}
            steps, todo = origin.steps, [root_of(given[i]).name for i in origin.reads]
        others, seen = held - {tensor.name}, set[int]()
        while todo:
            name = todo.pop()
            if name is None:
                return None
            if name in others or name not in owner or place[owner[name]] in seen:
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

    for at, tensor in wide.items():
        read = None if tensor.name in locked else sources(tensor)
        if read is None:
            continue
        new = {name: int(values[name].untyped_storage().nbytes()) for name in sorted(read - held)}
        if sum(new.values()) + LEAST_BYTES <= tensor.bytes:
            found[at] = new
            held = held - {tensor.name} | read
            locked |= read
    return found
