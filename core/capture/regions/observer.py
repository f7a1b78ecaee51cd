"""Observes a run of a step with real tensors: what its calls return, and what its tail reads."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from ...tensor_metadata import name_of, state_of
from ..graph.alignment import aligned
from ..values.nesting import tensors_of
from ..values.value_watch import reads_values
from .calls import Calls, Place, Slot


@define(eq=False)
class Record:
    """The results of the calls before the tail.

    Args:
        names: of each call's function.
        returned: for each call, the nesting of its result, and its leaves; a `Slot` for a tensor.
        until: number of the first call of the tail.
        reads: numbers of earlier calls that read values of captured tensors.
    """

    names: list[str] = field(factory=list)
    returned: list[tuple[pytree.TreeSpec, list[Any]]] = field(factory=list)
    until: int = -1
    reads: set[int] = field(factory=set)


@frozen
class _Seen:
    """An observed call: its tensor arguments, those that it wrote, draws before it, and whether it reads values."""

    given: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    draws: int
    reads: bool


@define(eq=False)
class Tail:
    """The reads and writes of the tail of a step.

    Args:
        record: results of the calls before it.
        needed: place → tensor, for tensors computed before the tail that it reads.
        touched: other tensors that it reads, such as parameters, by identity.
        before, made: identities of the tensors that are read, and that are computed, before it.
        written: identities of tensors that it writes in place.
        draws: number of random draws before it.
    """

    record: Record
    needed: dict[Place, Tensor]
    touched: dict[int, Tensor]
    before: set[int]
    made: set[int]
    written: set[int]
    draws: int


class Observer(Calls):
    """Records the reads and results of each call of a step.

    Args:
        drawn: returns the number of random draws so far.
    """

    def __init__(self, drawn: Callable[[], int]) -> None:
        super().__init__()
        self._record = Record()
        self._drawn = drawn
        self._made: dict[int, Place] = {}
        self._seen: list[_Seen] = []
        self._alive: list[Any] = []

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        leaves = tensors_of(given)
        given_or_held = (*leaves, *self.held)
        states = [state_of(tensor) for tensor in given_or_held]
        draws, result = self._drawn(), run()
        written = tuple(t for t, before in zip(given_or_held, states, strict=True) if state_of(t) != before)
        self._seen.append(_Seen(given_or_held, written, draws, reads_values(func)))
        flat, spec = pytree.tree_flatten(result)
        places = {id(tensor): i for i, tensor in reversed(list(enumerate(leaves)))}
        slots: list[Any] = []
        for position, leaf in enumerate(flat):
            if not isinstance(leaf, Tensor):
                slots.append(leaf)
                continue
            slots.append(Slot.of(leaf, places.get(id(leaf))))
            if id(leaf) not in places:
                self._made.setdefault(id(leaf), (number, position))
        self._record.names.append(name_of(func))
        self._record.returned.append((spec, slots))
        self._alive.append(result)
        return result

    def tail(self, names: Sequence[str], result: Any) -> tuple[Tail, dict[int, int]]:
        """The tail that starts at the last of some calls.

        Args:
            names: of the calls up to there during capture, when libraries may call other functions.
            result: of the step; the tail returns the parts of it that were computed before.

        Returns:
            The tail, and the number of a call in this run → its number during capture.
        """
        number = dict(aligned(self._record.names, names))
        # The last call itself may exist only during capture; then the tail starts after the call before it.
        before = max((here for here, there in number.items() if there < len(names) - 1), default=-1)
        until = next((here for here, there in number.items() if there == len(names) - 1), before + 1)
        before_tail = {id(tensor) for seen in self._seen[:until] for tensor in seen.given}
        made = {tensor for tensor, place in self._made.items() if place[0] < until}
        tail = Tail(evolve(self._record, until=until), {}, {}, before_tail, made, set(), 0)
        # The tail may have no call at all, only Python.
        tail.draws = self._seen[until].draws if until < len(self._seen) else self._drawn()
        for here, seen in enumerate(self._seen):
            places = [self._made.get(id(tensor)) for tensor in seen.given]
            if here >= until:
                tail.written |= {id(tensor) for tensor in seen.written}
            elif seen.reads and all(place is None or place[0] in number for place in places):
                tail.record.reads.add(here)  # such as a number to print; the others only decide what is computed
            else:
                continue
            for tensor, place in zip(seen.given, places, strict=True):
                if place is None:
                    tail.touched[id(tensor)] = tensor
                elif place[0] < until:
                    tail.needed[place] = tensor
        for tensor in pytree.tree_leaves(result):
            place = self._made.get(id(tensor))
            if place is not None and place[0] < until:
                tail.needed[place] = tensor
        return tail, number
