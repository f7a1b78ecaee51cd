"""Time against memory: which of several results comes first, and which ones no other beats.

Computed times that differ by less than ``EQUAL`` are equal: they are sums of the same numbers in another order. Of
equal times the one with less memory comes first.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

EQUAL = 1e-9
"""Difference of two computed times below which they are equal, as a share of the smaller one."""

Item = TypeVar("Item")


def by_time(items: Iterable[Item], time: Callable[[Item], float], memory: Callable[[Item], float]) -> list[Item]:
    """The items by ascending time, those of equal time by ascending memory, and then in their order.

    Args:
        items: in an order that decides between equals.
    """
    found = list(items)
    times = [time(item) for item in found]
    ordered: list[int] = []
    equal: list[int] = []

    def close() -> None:
        ordered.extend(sorted(equal, key=lambda place: (memory(found[place]), place)))
        equal.clear()

    for place in sorted(range(len(found)), key=lambda place: (times[place], place)):
        if equal and times[place] > times[equal[0]] * (1 + EQUAL):
            close()
        equal.append(place)
    close()
    return [found[place] for place in ordered]


def frontier(items: Iterable[Item], time: Callable[[Item], float], memory: Callable[[Item], float]) -> list[Item]:
    """The Pareto frontier, fastest first: each item has less memory than all that are faster."""
    kept: list[Item] = []
    for item in by_time(items, time, memory):
        if not kept or memory(item) < memory(kept[-1]) * (1 - EQUAL):
            kept.append(item)
    return kept
