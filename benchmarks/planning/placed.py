"""A small case on a placement of its operators: times, memory, and lower bounds.

Every operator is a stage of its own. That excludes nothing: where messages are pure delays the order of a larger stage
is also an order of its operators, with the same time and memory or less.

The operators of a case are a chain with further edges: each microbatch runs F of all operators, then I of all in
reverse. So between F and I of an operator a device holds what all its earlier operators saved.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from panpipe.core.evaluate.coding import FORWARD, INPUT, WEIGHT

from benchmarks.planning.small_cases import AMPLE, Case

HUGE = 10**9


def placements(operators: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All devices of all operators; equal devices are numbered by their first use."""

    def after(first: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(first) == operators:
            yield first
            return
        for device in range(min(max(first) + 2, devices)):
            yield from after((*first, device))

    return after((0,))


class Placed:
    """A case with a device for each operator.

    Args:
        case: the request.
        device_of: of each operator.
    """

    def __init__(self, case: Case, device_of: Sequence[int]) -> None:
        graph = case.graph
        self.case, self.device_of, self.count = case, tuple(device_of), case.microbatches
        self.operators = range(len(graph.nodes))
        self.times = [tuple(map(int, (n.forward_s, n.backward_input_s, n.backward_weight_s))) for n in graph.nodes]
        self.on = [[i for i in self.operators if device_of[i] == d] for d in range(len(case.cluster.devices))]
        self.saved, self.workspace = (
            [int(getattr(n, f"{k}_bytes")) for n in graph.nodes] for k in ("saved", "workspace")
        )
        self.spare = [case.limit - sum(graph.nodes[i].state_bytes for i in own) for own in self.on]
        self.edges: list[tuple[int, int, int, int]] = []
        """Source, reader, delay of the output, delay of the gradient."""
        for edge in graph.edges:
            a, b = graph.index[edge.src], graph.index[edge.dst]
            apart = self.device_of[a] != self.device_of[b]
            delay, back = case.latency_s + edge.bytes, case.latency_s + max(edge.bytes, 1)
            self.edges.append((a, b, apart * delay, apart * back))

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """Earliest start of F and I of each operator."""
        return self._starts(0)

    @cached_property
    def turns(self) -> list[int]:
        """The least time from the start of F of each operator to the end of its I."""
        return [self._starts(i)[0][INPUT] + self.times[i][INPUT] for i in self.operators]

    def _starts(self, first: int) -> list[tuple[int, int]]:
        """Earliest start of F and I of the operators from ``first`` on, if its F starts at 0."""
        forward, back = {first: 0}, dict[int, int]()
        for b in self.operators[first + 1 :]:
            forward[b] = max(
                forward[a] + self.times[a][FORWARD] + out for a, r, out, _ in self.edges if r == b and a >= first
            )
        for a in reversed(self.operators[first:]):
            ends = [back[b] + self.times[b][INPUT] + delay for s, b, _, delay in self.edges if s == a]
            back[a] = max([forward[a] + self.times[a][FORWARD], *ends])
        return [(forward[i], back[i]) for i in self.operators[first:]]

    @cached_property
    def tails(self) -> list[tuple[int, int, int]]:
        """Time from the start of F, I and W of each operator to the end of all that follows."""
        back, forward = dict[int, int](), dict[int, int]()
        for b in self.operators:
            later = [delay + back[a] for a, r, _, delay in self.edges if r == b]
            back[b] = self.times[b][INPUT] + max([self.times[b][WEIGHT], *later])
        for a in reversed(self.operators):
            later = [out + forward[b] for s, b, out, _ in self.edges if s == a]
            forward[a] = self.times[a][FORWARD] + max([back[a], *later])
        return [(forward[i], back[i], self.times[i][WEIGHT]) for i in self.operators]

    def in_flight(self, device: int) -> Iterator[tuple[int, int]]:
        """Each operator of a device, with the most microbatches between the start of its F and the end of its I."""
        held = 0
        for i in self.on[device]:
            held += self.saved[i]
            yield i, min((self.spare[device] - self.workspace[i]) // held if held else HUGE, self.count)

    @property
    def is_short(self) -> bool:
        """Whether memory is a limit."""
        return self.case.limit < AMPLE

    @cached_property
    def bound_s(self) -> int:
        """A lower bound of the step of every order; ``HUGE`` if one microbatch does not fit.

        The largest, over the devices, of
        - head, work and tail: until the first gradient arrives a device runs F alone, after its last I W alone;
        - turns: F of a microbatch waits for I of one before, if memory does not hold both;
        - memory: bytes times seconds that all microbatches hold at least, over the device's bytes.
        """
        bound = max(tail for tail, _, _ in self.tails)
        for d, own in enumerate(self.on):
            if not own:
                continue
            if any(most < 1 for _, most in self.in_flight(d)):
                return HUGE
            first, last = own[0], own[-1]
            alone = dict.fromkeys(own, self.count)
            if self.is_short:
                alone = {i: min(self.count, self.spare[d] // self.saved[i] if self.saved[i] else HUGE) for i in own}
                for i, most in self.in_flight(d):
                    waits = -(-self.count // most) - 1
                    bound = max(bound, self.heads[i][FORWARD] + waits * self.turns[i] + self.tails[i][FORWARD])
                held = self.count * sum(self.saved[i] * (self.turns[i] + self.times[i][WEIGHT]) for i in own)
                bound = max(bound, self.heads[first][FORWARD] + -(-held // self.spare[d]))
            work = self.count * sum(sum(self.times[i]) for i in own)
            arrival = self.heads[last][INPUT]
            before = min(sum(alone[i] * self.times[i][FORWARD] for i in own), arrival - self.heads[first][FORWARD])
            after = sum(alone[i] * self.times[i][WEIGHT] for i in own)
            drain = self.tails[first][INPUT] - self.times[first][INPUT]
            bound = max(bound, arrival + work - before - after + max(drain, after))
        return bound
