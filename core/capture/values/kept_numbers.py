"""Kept numbers: numbers that a step keeps from one run to the next, followed through trial runs.

In a captured step such a number stays as it is. This changes nothing that the step computes if the number only reaches
texts and other Python objects: a count that selects which steps print, the sum of a meter. In a trial run a
`KeptNumber` replaces the number. It computes as Python does, and its results are kept numbers, too. Any other use of
its value, such as by an operator of torch, is recorded, and so is each condition on it, so that another run takes the
other side. A text of a kept number is followed, too: it has a mark, and must arrive where texts are shown or stored.
"""

import dis
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from attrs import define, field

from .text_marks import UnknownText, plain

_STAND_IN = 8 * 10**14
"""Added to the number of a text where Python converts a number for ``text % number``: its digits are the mark."""
_MARKED = re.compile("\x01([0-9]+)\x01|800([0-9]{12})")
_NUMBERS = (int, float, complex, Decimal, Fraction)


@define(eq=False)
class Followed:
    """What happens to the kept numbers of a run.

    Attributes:
        taken: the truth of each condition, in order.
        escaped: whether more than texts, Python objects and conditions needed a value, or a text was read.
    """

    taken: list[bool] = field(factory=list)
    escaped: bool = False
    _forced: Sequence[bool] = ()
    _texts: int = 0
    _arrived: set[int] = field(factory=set)

    def begin(self, forced: Sequence[bool] = ()) -> None:
        """Begin a run in which the first conditions are as given."""
        self.taken, self._forced = [], forced
        self._texts, self._arrived = 0, set()

    def text(self, text: str) -> "KeptText":
        """The text of a number, with a mark.

        Args:
            text: as Python writes the number.
        """
        return KeptText(f"\x01{self._next()}\x01{text}", self)

    def stand_in(self) -> int:
        """A number whose digits are a mark."""
        return _STAND_IN + self._next()

    def arrive(self, texts: Iterable[Any]) -> None:
        """Record that texts are shown or stored; other values are ignored."""
        for text in texts:
            if isinstance(text, str):
                self._arrived.update(int(a or b) for a, b in _MARKED.findall(plain(text)))

    def all_arrived(self) -> bool:
        """Whether each text of a number in this run was shown or stored: one that was not may have been compared."""
        return len(self._arrived) == self._texts

    def _next(self) -> int:
        self._texts += 1
        return self._texts - 1

    def decide(self, truth: bool) -> bool:
        """The truth of a condition in this run.

        Args:
            truth: by the value that the number has.
        """
        place = len(self.taken)
        self.taken.append(self._forced[place] if place < len(self._forced) else truth)
        return self.taken[-1]


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of kept numbers that computes as Python does with numbers."""

    def method(self: "KeptNumber", *others: Any) -> Any:
        values = [other.value if type(other) is KeptNumber else other for other in others]
        if not all(isinstance(value, _NUMBERS) or value is None for value in values):
            if all(isinstance(value, str | bytes | list | tuple) or callable(value) for value in values):
                return NotImplemented
            return self.escapes()
        found = function(self.value, *values)
        if isinstance(found, tuple):  # of divmod
            return tuple(KeptNumber(one, self.followed) for one in found)
        return KeptNumber(found, self.followed)

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return _computed(lambda a, b: function(b, a))


def _equality(function: Callable[..., Any], otherwise: bool) -> Callable[..., Any]:
    compare = _computed(function)

    def method(self: "KeptNumber", other: Any) -> Any:
        found = compare(self, other)
        return otherwise if found is NotImplemented else found

    return method


def _converted(kind: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: "KeptNumber") -> Any:
        return kind(self.followed.stand_in()) if _formats() else self.escapes()

    return method


def _formats() -> bool:
    """Whether the code that runs is at ``text % values``, for which Python converts numbers."""
    frame: Any = sys._getframe(2)
    at = next(each for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti)
    return at.opname == "BINARY_OP" and at.argrepr in ("%", "%=")


class KeptText(UnknownText):
    """A text with the mark of a kept number.

    Args:
        text: as it is written.
        followed: records uses that need the characters.
    """

    followed: Followed

    def __new__(cls, text: str, followed: Followed) -> "KeptText":
        made = super().__new__(cls, text)
        made.followed = followed
        return made

    def stops(self, use: str) -> Any:
        self.followed.escaped = True
        raise TypeError(f"{use} of a text of a number that the step keeps")

    def joined(self, text: str) -> str:
        return KeptText(text, self.followed)


class KeptNumber:
    """A number of a trial run that the step keeps in Python.

    Args:
        value: the number.
        followed: records conditions, and other uses.
    """

    def __init__(self, value: Any, followed: Followed) -> None:
        self.value, self.followed = value, followed

    def escapes(self) -> Any:
        """Record that something needs the value, and stop."""
        self.followed.escaped = True
        raise TypeError("a number that the step keeps is needed here")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For ``isinstance``: the type of the number."""
        return type(self.value)

    def __bool__(self) -> bool:
        return self.followed.decide(bool(self.value))

    def __format__(self, spec: str) -> str:
        return self.followed.text(format(self.value, spec))

    def __repr__(self) -> str:
        return self.followed.text(repr(self.value))

    def __str__(self) -> str:
        return self.followed.text(str(self.value))

    def __hash__(self) -> int:
        return int(self.escapes())

    def __getattr__(self, name: str) -> Any:
        if hasattr(int, name) or hasattr(float, name):
            return self.escapes()
        raise AttributeError(name)

    __add__, __radd__ = _computed(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _computed(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _computed(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _computed(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _computed(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _computed(operator.mod), _reflected(operator.mod)
    __divmod__, __rdivmod__ = _computed(divmod), _reflected(divmod)
    __pow__, __rpow__ = _computed(pow), _reflected(pow)
    __and__, __rand__ = _computed(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _computed(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _computed(operator.xor), _reflected(operator.xor)
    __neg__, __pos__, __abs__ = _computed(operator.neg), _computed(operator.pos), _computed(abs)
    __invert__, __round__ = _computed(operator.invert), _computed(round)
    __floor__, __ceil__, __trunc__ = _computed(math.floor), _computed(math.ceil), _computed(math.trunc)
    __lt__, __le__, __gt__ = _computed(operator.lt), _computed(operator.le), _computed(operator.gt)
    __ge__ = _computed(operator.ge)
    __eq__, __ne__ = _equality(operator.eq, False), _equality(operator.ne, True)
    __int__, __float__, __index__, __complex__ = (_converted(kind) for kind in (int, float, operator.index, complex))
