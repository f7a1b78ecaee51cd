"""ZB-H1, ZB-H2, ZB-1p and ZB-2p: 1F1B with its backward split, so that W fills what I leaves idle (Zero Bubble
Pipeline Parallelism, arXiv 2401.10241).

The two by hand fix everything by counting. Device d of p runs some forwards ahead, then I and F in turn, and each W
some microbatches behind its I::

            forwards ahead    W behind its I    held at most
    ZB-H1   p − d             d                 p
    ZB-H2   2(p − d) − 1      2d                2p − 1

The two automatic ones take the costs and a limit, p or 2p microbatches' worth where none is given. They try how many
forwards run ahead, let W fill idle time and keep within the limit, and take the fastest (section 3.1, as a search).
"""

from collections.abc import Iterator

from ..actions import Action, Kind
from ..errors import InfeasibleError, RequestError
from .fill import fill_weights
from .order import grouped, merge
from .placement import looped_placement
from .problem import Schedule, ScheduleFamily, ScheduleProblem
from .scored import costs_of, score

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the forwards that the limit leaves room for beyond 1F1B's, how many the first device runs ahead."""


def zb_h1(problem: ScheduleProblem) -> Schedule:
    """ZB-H1: 1F1B's memory on every device, idle (p − 1)(F + I − W).

    Raises:
        RequestError: more than one stage a device.
    """
    p = problem.devices
    return _by_hand(problem, "zb-h1", [(p - d, d) for d in range(p)])


def zb_h2(problem: ScheduleProblem) -> Schedule:
    """ZB-H2: 2p − 1 microbatches on every device, idle (p − 1)(F + I − 2W).

    Raises:
        RequestError: more than one stage a device.
    """
    p = problem.devices
    return _by_hand(problem, "zb-h2", [(2 * (p - d) - 1, 2 * d) for d in range(p)])


def zb_1p(problem: ScheduleProblem) -> Schedule:
    """ZB-1p: the fastest found within p microbatches a device, or within ``problem.memory_limit``.

    Raises:
        RequestError: more than one stage a device.
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _automatic(problem, "zb-1p", problem.devices)


def zb_2p(problem: ScheduleProblem) -> Schedule:
    """ZB-2p: the fastest found within 2p microbatches a device, or within ``problem.memory_limit``.

    Raises:
        RequestError: more than one stage a device.
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _automatic(problem, "zb-2p", 2 * problem.devices)


def _by_hand(problem: ScheduleProblem, name: str, counts: list[tuple[int, int]]) -> Schedule:
    _one_stage(problem, name)
    orders = tuple(
        tuple(_weights_behind(_row(device, problem.microbatches, ahead), behind))
        for device, (ahead, behind) in enumerate(counts)
    )
    return Schedule(name, looped_placement(problem.devices, 1), problem.microbatches, orders)


def _row(device: int, microbatches: int, ahead: int) -> tuple[Action, ...]:
    """F and I of one device."""
    forwards, backwards = (grouped([device], kind, [microbatches]) for kind in (Kind.F, Kind.I))
    return merge(forwards, backwards, ahead, microbatches)


def _weights_behind(row: tuple[Action, ...], behind: int) -> Iterator[Action]:
    """The row with every W that many microbatches behind its I, and the last ones at the end."""
    waiting: list[Action] = []
    for action in row:
        yield action
        if action.kind is Kind.I:
            waiting.append(Action(action.stage, Kind.W, action.microbatch))
            if len(waiting) > behind:
                yield waiting.pop(0)
    yield from waiting


def _automatic(problem: ScheduleProblem, name: str, usual: int) -> Schedule:
    _one_stage(problem, name)
    limits = [usual] * problem.devices
    if problem.memory_limit is not None:
        limits = [_fitting(problem, device) for device in range(problem.devices)]
    placement = looped_placement(problem.devices, 1)
    best: tuple[float, Schedule] | None = None
    for aheads in _aheads(limits):
        rows = [_row(device, problem.microbatches, ahead) for device, ahead in enumerate(aheads)]
        found = Schedule(name, placement, problem.microbatches, fill_weights(problem, placement, rows, limits))
        makespan = score(problem, found).result.makespan
        if best is None or makespan < best[0]:
            best = makespan, found
    assert best is not None
    return best[1]


def _fitting(problem: ScheduleProblem, device: int) -> int:
    """How many microbatches fit on a device, whether I leaves more than F saved or less."""
    cost, limit = costs_of(problem)[device], problem.memory_limit or 0.0
    need = max(cost.saved_bytes, cost.saved_bytes - cost.freed_by_input_bytes + cost.created_by_input_bytes)
    if need > limit * (1 + 1e-9):
        raise InfeasibleError(
            f"one microbatch needs {need:g} on device {device} and the limit is {limit:g}: give at least {need:g}"
        )
    return problem.microbatches if need == 0 else min(int(limit * (1 + 1e-9) / need), problem.microbatches)


def _aheads(limits: list[int]) -> list[tuple[int, ...]]:
    """Forwards ahead of the first I for each device: 1F1B's, and a share of what the limit leaves beyond them."""
    p = len(limits)
    found = []
    for share in _SHARES:
        extra = max(limits[0] - p, 0) * share
        ahead = [max(1, min(limit, p - d + round(extra * (p - 1 - d) / max(p - 1, 1)))) for d, limit in enumerate(limits)]
        for device in range(p - 2, -1, -1):  # a device never waits for one that runs fewer ahead than the next
            ahead[device] = max(ahead[device], min(ahead[device + 1], limits[device]))
        found.append(tuple(ahead))
    return list(dict.fromkeys(found))


def _one_stage(problem: ScheduleProblem, name: str) -> None:
    if problem.chunks != 1:
        raise RequestError(f"{name} with {problem.chunks} chunks: it has one stage a device; give 1 chunk")


def _family(build, name: str, summary: str) -> ScheduleFamily:  # type: ignore[no-untyped-def]
    return ScheduleFamily(name, build, f"{summary} (Zero Bubble)", split_backward=True, chunks=(1,))


ZB_H1 = _family(zb_h1, "zb-h1", "1F1B with W in the idle time, at 1F1B's memory")
ZB_H2 = _family(zb_h2, "zb-h2", "more forwards ahead, at twice 1F1B's memory")
ZB_1P = _family(zb_1p, "zb-1p", "the fastest found within 1F1B's memory or a limit")
ZB_2P = _family(zb_2p, "zb-2p", "the fastest found within twice 1F1B's memory or a limit")
