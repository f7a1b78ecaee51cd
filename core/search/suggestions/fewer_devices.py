"""Whether fewer of a cluster's devices alone are faster, because there is little to compute or messages are slow."""

from collections.abc import Callable, Iterator

from ...errors import InfeasibleError, RequestError
from ...plan.plan import Plan

SLOWER = 0.99
"""A plan for fewer devices is faster if its step takes at most this share of the other's."""


def faster_alone(plan: Plan, search: Callable[[int], Plan]) -> Plan | None:
    """The fastest plan for half of the devices, a quarter and so on down to one; None if none is faster.

    A number of devices is only searched if a plan whose devices never idle would be faster.

    Args:
        plan: for all devices, in one pipeline, with its prediction.
        search: a number n → the best plan for the first n devices.
    """
    costs, best, found = plan.predicted.costs, SLOWER * plan.predicted.step_s, None
    compute_s = plan.microbatches * sum(cost.forward_s + cost.full_backward_s for cost in costs)
    for devices in _halves(plan.devices):
        if compute_s / devices >= best:
            break
        try:
            other = search(devices)
        except (InfeasibleError, RequestError):
            continue
        if other.predicted.step_s < best:
            best, found = other.predicted.step_s, other
    return found


def _halves(devices: int) -> Iterator[int]:
    while devices > 1:
        devices //= 2
        yield devices
