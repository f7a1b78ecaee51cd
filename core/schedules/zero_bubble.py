"""ZB-H1, ZB-H2, ZB-1p and ZB-2p: 1F1B with split backwards, so that W fills idle time.

They are from Zero Bubble Pipeline Parallelism (arXiv 2401.10241).

The handcrafted ZB-H1 and ZB-H2 are defined by counts. Device d of p runs some forwards ahead, then I and F in turn, and
each W some microbatches after its I::

            forwards ahead    W after its I     held at most
    ZB-H1   p − d             d                 p
    ZB-H2   2(p − d) − 1      2d                2p − 1

The automatic ZB-1p and ZB-2p take the costs and a memory limit (by default p or 2p microbatches) and keep the best of
several list schedules: a free device runs an available I; else F; and W where it would idle, or its next F does not
fit. The best has the shortest stage span, as in the paper, then the shortest makespan. Those with a longer span or
makespan than ZB-H1 (for ZB-2p: ZB-H2) are discarded if that one, which is also a candidate, fits in the limit.
"""

import itertools
from collections.abc import Iterator
from math import inf

from attrs import evolve

from ..actions import Action, Kind
from ..errors import InfeasibleError, RequestError
from ..timing.coding import encode
from .construction.order import grouped, merge
from .problem import Builder, Schedule, ScheduleFamily, ScheduleProblem, looped_placement
from .scored import ROUNDING, costs_of

PATIENCE = tuple(itertools.product((1.0, 0.5, 0.2, 0.0), (0.0,), (1.0, 0.98, 0.0)))
"""How long a device waits for an I before it runs F, and for an F or I before it runs W: see `decode`. The paper has
switches for the same."""
FEW, MANY = ((0.5, 0.0, 0.0), (1.0, 0.0, 0.98)), 300_000
"""From this many actions on, only these two: in 800 smaller problems the better one is 0.2 % slower than the best."""


def zb_h1(problem: ScheduleProblem) -> Schedule:
    """ZB-H1: 1F1B's memory on every device, idle (p − 1)(F + I − W).

    Raises:
        RequestError: more than one stage per device.
    """
    p = problem.devices
    return _by_hand(problem, "zb-h1", [(p - d, d) for d in range(p)])


def zb_h2(problem: ScheduleProblem) -> Schedule:
    """ZB-H2: 2p − 1 microbatches on every device, idle (p − 1)(F + I − 2W).

    Raises:
        RequestError: more than one stage per device.
    """
    p = problem.devices
    return _by_hand(problem, "zb-h2", [(2 * (p - d) - 1, 2 * d) for d in range(p)])


def zb_1p(problem: ScheduleProblem) -> Schedule:
    """ZB-1p: the fastest found within p microbatches per device, or within ``problem.memory_limit``.

    Raises:
        RequestError: more than one stage per device.
        InfeasibleError: the limit does not fit one microbatch.
    """
    return _automatic(problem, "zb-1p", problem.devices, zb_h1)


def zb_2p(problem: ScheduleProblem) -> Schedule:
    """ZB-2p: the fastest found within 2p microbatches per device, or within ``problem.memory_limit``.

    Raises:
        RequestError: more than one stage per device.
        InfeasibleError: the limit does not fit one microbatch.
    """
    return _automatic(problem, "zb-2p", 2 * problem.devices, zb_h2)


def _by_hand(problem: ScheduleProblem, name: str, counts: list[tuple[int, int]]) -> Schedule:
    _one_stage(problem, name)
    orders = tuple(
        tuple(_delay_weights(_row(device, problem.microbatches, ahead), delay))
        for device, (ahead, delay) in enumerate(counts)
    )
    return Schedule(name, looped_placement(problem.devices, 1), problem.microbatches, orders)


def _row(device: int, microbatches: int, ahead: int) -> tuple[Action, ...]:
    """F and I of one device."""
    forwards, backwards = (grouped([device], kind, [microbatches]) for kind in (Kind.F, Kind.I))
    return merge(forwards, backwards, ahead, microbatches)


def _delay_weights(row: tuple[Action, ...], delay: int) -> Iterator[Action]:
    """The row with every W ``delay`` microbatches after its I, and the last ones at the end."""
    waiting: list[Action] = []
    for action in row:
        yield action
        if action.kind is Kind.I:
            waiting.append(Action(action.stage, Kind.W, action.microbatch))
            if len(waiting) > delay:
                yield waiting.pop(0)
    yield from waiting


def _automatic(problem: ScheduleProblem, name: str, usual: int, by_hand: Builder) -> Schedule:
    import numpy as np  # here: numpy and compiled code take longer to load than most schedules to build

    from .construction.list_scheduler import Listed, Priorities, instance

    _one_stage(problem, name)
    devices, count = problem.devices, problem.microbatches
    limits = np.array(_limits(problem, usual)) * (1 + ROUNDING)
    task = evolve(instance(problem, looped_placement(devices, 1)), limits=limits)
    known = evolve(by_hand(problem), name=name)
    coded = Listed((inf, inf), *encode(known.device_actions, count))
    fits, hand = task.fits(coded), task.spans(coded)
    most = [time * (1 + ROUNDING) if fits else inf for time in hand]
    found: list[tuple[tuple[bool, tuple[float, float]], Listed | None]] = [((False, hand), None)] if fits else []
    turn = np.arange(count, dtype=float)
    keys = np.stack([np.tile(turn + order * count, (devices, 1)) for order in (1, 0, 2)])  # I, then F, then W
    whole = np.zeros(devices, dtype=np.bool_)
    for patience in PATIENCE if 3 * devices * count < MANY else FEW:
        listed = task.listed(Priorities(keys, np.array(patience), np.full(devices, count), whole, greedy=True))
        span, makespan = task.spans(listed)
        found.append(((span > most[0] or makespan > most[1], (span, makespan)), listed))
    best = min(found, key=lambda each: each[0])[1]
    return known if best is None else task.schedule(name, best.orders, best.lengths)


def _limits(problem: ScheduleProblem, usual: int) -> list[float]:
    """Memory limit of each device."""
    needs = [cost.reserved_bytes for cost in costs_of(problem)]
    if problem.memory_limit is None:
        return [usual * need for need in needs]
    if max(needs) > problem.memory_limit * (1 + ROUNDING):
        raise InfeasibleError(
            f"one microbatch needs {max(needs):g} on device {needs.index(max(needs))} and the limit is "
            f"{problem.memory_limit:g}: give at least {max(needs):g}"
        )
    return [problem.memory_limit] * problem.devices


def _one_stage(problem: ScheduleProblem, name: str) -> None:
    if problem.chunks != 1:
        raise RequestError(f"chunks is {problem.chunks}: {name} has one stage on each device; give 1")


def _family(build: Builder, name: str, summary: str) -> ScheduleFamily:
    return ScheduleFamily(name, build, f"{summary} (Zero Bubble)", split_backward=True, chunks=(1,))


ZB_H1 = _family(zb_h1, "zb-h1", "1F1B with W in the idle time, at 1F1B's memory")
ZB_H2 = _family(zb_h2, "zb-h2", "more forwards ahead, at twice 1F1B's memory")
ZB_1P = _family(zb_1p, "zb-1p", "the fastest found within 1F1B's memory or a limit")
ZB_2P = _family(zb_2p, "zb-2p", "the fastest found within twice 1F1B's memory or a limit")
