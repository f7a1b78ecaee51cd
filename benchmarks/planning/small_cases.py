"""Two hundred random graphs of up to nine operators, for a comparison of the search with the exact optimum."""

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen
from panpipe.core.cluster.cluster import Cluster, fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode

CASES = 200
RATE = 1.0
"""Bytes per second: with whole numbers of bytes all times are whole numbers of seconds."""
AMPLE = 10**6
"""Bytes of a device whose memory is no limit."""


@frozen
class Case:
    """A request.

    Args:
        name: for people.
        graph, cluster, microbatches: of the request; all times are whole numbers.
        latency_s: of every link.
        limit: bytes of each device.
    """

    name: str
    graph: OpGraph
    cluster: Cluster
    microbatches: int
    latency_s: int
    limit: int

    @property
    def longest_s(self) -> int:
        """One microbatch after another, with every message."""
        work = sum(n.forward_s + n.backward_input_s + n.backward_weight_s for n in self.graph.nodes)
        messages = sum(2 * (edge.bytes + self.latency_s + 1) for edge in self.graph.edges)
        return int(self.microbatches * (work + messages))


def case_of(number: int) -> Case:
    """The case of a number: the same everywhere."""
    draw = random.Random(number)
    operators, devices, count = draw.randint(4, 9), draw.choice((2, 3)), draw.randint(4, 6)
    operators = max(operators, devices + 1)
    longest = draw.choice((10, 30, 60))
    tight = number % 2 == 1
    nodes = tuple(
        OpNode(
            f"n{i}", draw.randint(1, longest), draw.randint(1, longest), draw.randint(0, longest), 0.0, 0,
            state_bytes=draw.randint(0, 60), saved_bytes=draw.randint(1, 30), workspace_bytes=draw.randint(0, 15),
        )
        for i in range(operators)
    )  # fmt: skip
    edges = [OpEdge(f"n{i}", f"n{i + 1}", draw.randint(0, longest // 3)) for i in range(operators - 1)]
    pairs = [(a, b) for a, b in itertools.combinations(range(operators), 2) if b > a + 1]
    edges += [
        OpEdge(f"n{a}", f"n{b}", draw.randint(0, longest // 3))
        for a, b in draw.sample(pairs, min(draw.randint(0, 2), len(pairs)))
    ]
    graph, latency_s = OpGraph(nodes, tuple(edges)), draw.randint(0, 3)
    limit = AMPLE
    if tight:
        least = least_limit(graph, devices)
        limit = int(least * draw.choice((1.0, 1.05, 1.2, 1.5)))
    name = f"{number}: {operators} operators, {devices} devices, {count} mb{', short' if tight else ''}"
    return Case(name, graph, fully_connected(devices, limit, RATE, float(latency_s)), count, latency_s, limit)


def least_limit(graph: OpGraph, devices: int) -> int:
    """The smallest memory of a device with which one microbatch after another fits, over all devices of operators."""
    best = sys.maxsize
    for chosen in itertools.product(range(devices), repeat=len(graph.nodes) - 1):
        needs = [0] * devices
        for device in range(devices):
            own = [node for node, d in zip(graph.nodes, (0, *chosen), strict=True) if d == device]
            saved, peak = 0, 0
            for node in own:
                saved += node.saved_bytes
                peak = max(peak, saved + node.workspace_bytes)
            needs[device] = sum(node.state_bytes for node in own) + peak
        best = min(best, max(needs))
    return best
