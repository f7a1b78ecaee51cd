"""The fastest order of a few actions, by trying all orders: a check of cleverer searches."""

from itertools import product

FORWARD, INPUT, WEIGHT = range(3)


def fastest_by_trial(times, device_of, edges, saved, workspace, room, count):
    """The least step over all orders of all devices; infinite if none fits.

    Args:
        times: of F, I and W of each operator.
        device_of: device of each operator.
        edges: (source, reader, delay of the output, delay of the gradient).
        saved, workspace: bytes of each operator.
        room: bytes of each device.
        count: microbatches; they take part in any order, but the first operator on its own.
    """
    operators = range(len(times))
    before = {}
    for i, m in product(operators, range(count)):
        before[i, FORWARD, m] = [((a, FORWARD, m), delay) for a, b, delay, _ in edges if b == i]
        before[i, INPUT, m] = [((i, FORWARD, m), 0)] + [((b, INPUT, m), delay) for a, b, _, delay in edges if a == i]
        before[i, WEIGHT, m] = [((i, INPUT, m), 0)]
        if i == 0 and m:
            before[i, FORWARD, m].append(((i, FORWARD, m - 1), 0))  # microbatches are alike
    best, seen = [float("inf")], set()

    def visit(ends, free, held, left):
        if max(now + work for now, work in zip(free, left, strict=True)) >= best[0]:
            return
        if len(ends) == len(before):
            best[0] = max(free)
            return
        key = frozenset(ends.items())
        if key in seen:
            return
        seen.add(key)
        for action, needs in before.items():
            (i, kind, _), d = action, device_of[action[0]]
            more = saved[i] if kind == FORWARD else 0
            if action in ends or any(other not in ends for other, _ in needs):
                continue
            if held[d] + more + workspace[i] > room[d]:
                continue
            end = max([free[d], *(ends[other] + delay for other, delay in needs)]) + times[i][kind]
            kept = held[d] + more - (saved[i] if kind == WEIGHT else 0)
            visit(
                {**ends, action: end},
                (*free[:d], end, *free[d + 1 :]),
                (*held[:d], kept, *held[d + 1 :]),
                (*left[:d], left[d] - times[i][kind], *left[d + 1 :]),
            )

    work = [count * sum(sum(times[i]) for i in operators if device_of[i] == d) for d in range(len(room))]
    visit({}, (0,) * len(room), (0,) * len(room), tuple(work))
    return best[0]
