"""Max-min fair shares: what each transfer gets of the links that it crosses together with others.

Progressive filling: all rates grow alike until a link is full or a transfer has reached its own limit; what that
stops keeps its rate, and the others grow on. No transfer can then get more without one that has no more losing some.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Link = TypeVar("Link", bound=Hashable)


def fair_rates(
    routes: Sequence[Sequence[Link]], limits: Sequence[float], capacity: Mapping[Link, float]
) -> list[float]:
    """Rate of every transfer, in bytes/s.

    Args:
        routes: per transfer the links that it crosses, each in one direction.
        limits: per transfer the rate that it cannot exceed, whoever else is there.
        capacity: per link what it moves, in bytes/s.
    """
    rates = [0.0] * len(routes)
    growing = dict.fromkeys(range(len(routes)))
    left = {link: capacity[link] for route in routes for link in route}
    while growing:
        crossing = dict.fromkeys(left, 0)
        for transfer in growing:
            for link in routes[transfer]:
                crossing[link] += 1
        level = min((left[link] / count for link, count in crossing.items() if count), default=float("inf"))
        level = min(level, *(limits[transfer] for transfer in growing))
        stopped = [
            transfer
            for transfer in growing
            if limits[transfer] <= level or any(left[link] / crossing[link] <= level for link in routes[transfer])
        ]
        for transfer in stopped:
            del growing[transfer]
            rates[transfer] = level
            for link in routes[transfer]:
                left[link] -= level
    return rates
