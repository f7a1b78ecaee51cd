"""Max-min fair sharing of link bandwidth among flows.

Progressive filling: all rates grow equally until a link is full or a flow reaches its own limit. The flows concerned
keep their rate, and the others grow further. At the end no flow can gain without a loss of a flow that has no more.
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
        routes: per flow the links that it crosses, each in one direction; a link is listed as often as it is crossed.
        limits: per flow its highest rate without contention.
        capacity: per link its bandwidth, in bytes/s.
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
