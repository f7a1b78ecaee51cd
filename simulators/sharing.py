"""Max-min fair shares: what each flow gets of the links that it crosses together with others.

Progressive filling: all rates grow alike until a link is full or a flow has reached its own limit; what that stops
keeps its rate, and the others grow on. No flow can then get more without one that has no more losing some.
(Bertsekas and Gallager, "Data Networks", section 6.5.2.)
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Link = TypeVar("Link", bound=Hashable)


def fair_rates(
    routes: Sequence[Sequence[Link]], limits: Sequence[float], capacity: Mapping[Link, float]
) -> tuple[list[float], list[Link | None]]:
    """Rate of every flow, in bytes/s, and the full link that holds it there; None where its own limit does.

    Args:
        routes: per flow the links that it crosses, each in one direction; a link stands as often as it is crossed.
        limits: per flow the rate that it cannot exceed, whoever else is there.
        capacity: per link what it moves, in bytes/s.
    """
    rates = [0.0] * len(routes)
    held_by: list[Link | None] = [None] * len(routes)
    growing = list(range(len(routes)))
    left = {link: capacity[link] for route in routes for link in route}
    while growing:
        crossing: dict[Link, int] = {}
        for flow in growing:
            for link in routes[flow]:
                crossing[link] = crossing.get(link, 0) + 1
        shares = {link: left[link] / count for link, count in crossing.items()}
        level = min([*shares.values(), *(limits[flow] for flow in growing)])
        grow_on = []
        for flow in growing:
            if limits[flow] > level:
                for link in routes[flow]:
                    if shares[link] <= level:
                        held_by[flow] = link
                        break
                else:
                    grow_on.append(flow)
                    continue
            rates[flow] = level
            for link in routes[flow]:
                left[link] -= level
        growing = grow_on
    return rates, held_by
