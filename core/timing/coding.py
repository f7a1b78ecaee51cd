"""Actions as integers, for compiled functions: ``4 · (stage · count + microbatch) + kind``.

``count`` is the number of microbatches of a step.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from ..actions import Action, Kind

if TYPE_CHECKING:  # numpy takes longer to load than most schedules to build
    import numpy as np
    from numpy.typing import NDArray

FORWARD, INPUT, WEIGHT, BOTH = range(4)
"""Kinds: F, I, W and the full backward."""
KINDS = 4
INFINITY = float("inf")
Floats: TypeAlias = "NDArray[np.float64]"
Integers: TypeAlias = "NDArray[np.int64]"

CODE = {Kind.F: FORWARD, Kind.I: INPUT, Kind.W: WEIGHT, Kind.B: BOTH}
KIND = {code: kind for kind, code in CODE.items()}


def encode(
    device_actions: Sequence[Sequence[Action]], count: int, *, split: Container[int] = ()
) -> tuple[Integers, Integers]:
    """Coded orders and their lengths, with capacity for every backward to be split.

    Args:
        split: the stages whose B are coded as I directly followed by W.
    """
    rows: list[list[int]] = []
    for order in device_actions:
        row: list[int] = []
        for action in order:
            assert action.microbatch is not None
            place = KINDS * (action.stage * count + action.microbatch)
            if action.kind is Kind.B and action.stage in split:
                row += (place + INPUT, place + WEIGHT)
            else:
                row.append(place + CODE[action.kind])
        rows.append(row)
    most = [3 * count * len({action.stage for action in order}) for order in device_actions]
    return order_arrays(rows, max([*most, *map(len, rows)], default=0))


def order_arrays(rows: Sequence[Sequence[int]], width: int) -> tuple[Integers, Integers]:
    """Coded orders as an array, (devices, width), and their lengths.

    Args:
        rows: per device the codes of its actions.
        width: capacity of a row; at least the longest one's length.
    """
    import numpy as np

    orders = np.zeros((len(rows), width), dtype=np.int64)
    for device, row in enumerate(rows):
        orders[device, : len(row)] = row
    return orders, np.array([len(row) for row in rows], dtype=np.int64)


def decode_orders(orders: Integers, lengths: Integers, stages: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of coded orders."""
    actions = _actions(stages, count)
    return tuple(
        tuple(actions[code] for code in row[:length])
        for row, length in zip(orders.tolist(), lengths.tolist(), strict=True)
    )


@lru_cache(maxsize=16)
def _actions(stages: int, count: int) -> list[Action]:
    """The action of every code, cached for all orders of this size."""
    places = ((stage, microbatch) for stage in range(stages) for microbatch in range(count))
    return [Action(stage, KIND[kind], microbatch) for stage, microbatch in places for kind in range(KINDS)]
