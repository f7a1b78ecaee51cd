"""Saved casts that the backward of a stage computes again (`recomputed_casts`), found operator by operator.

A stage computes a cast again from what it saves. Operators are not divided into stages yet: a cut between an operator
that casts and what its input is computed from is not expected, because both would be sent.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ..capture.graph.nodes import root_of
from ..capture.programs.recomputed_casts import MOST
from .single_operator import LoneOperator
from .work import TracedOperator

Place = TypeVar("Place")


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
        return len(seen) < MOST

    return {at for at, name in casts.items() if follows(name)}
