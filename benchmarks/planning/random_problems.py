"""Sixty random problems: the planner's plan against every named schedule, both simulated, and against a lower bound.

From a seed: uneven layers between an embedding and a vocabulary head; devices with links of their own, on one switch,
on two switches with a link between them, or on hosts; memory for 100 to 35 % of what 1F1B's saved tensors need. Every
second problem on hosts may offload. The planner may be at most 0.5 % slower than the best named schedule.

The bound holds for every plan that does not offload: it is the largest of
- work: all computation over all devices;
- path: one microbatch through all operators, or to one of them, which then runs all microbatches;
- memory: bytes × seconds that saved tensors are held at least, from F of an operator through all later ones and back,
  over the bytes that the devices have for them.

    python benchmarks/planning/random_problems.py [--cases 0,5] [--jobs 2] [--record FILE]

Each run appends its table to the record, so that the problems can be run in pieces.
"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate, pairwise

from attrs import evolve, frozen
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.schedules.problem import ScheduleFamily
from panpipe.core.schedules.registry import families, find_family, resident_families
from panpipe.core.search.choose import plan
from panpipe.core.search.search_options import SearchOptions
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate

WORST = 1.005
NAMED = 5_000
"""Evaluations for the cuts of a named schedule: more find nothing better for this few operators."""
AMPLE = 10**15


@frozen
class Problem:
    """A request.

    Args:
        name: for people.
        graph, cluster, microbatches: of the request.
        offload: whether saved tensors may leave the devices.
    """

    name: str
    graph: OpGraph
    cluster: Cluster
    microbatches: int
    offload: bool

    @property
    def bound_s(self) -> float:
        """A lower bound of the step without offload."""
        nodes, count = self.graph.nodes, self.microbatches
        through = list(accumulate(n.forward_s + n.backward_input_s for n in reversed(nodes)))[::-1]
        held = sum(n.saved_bytes * (t + n.backward_weight_s) for n, t in zip(nodes, through, strict=True))
        spare = sum(d.memory_bytes for d in self.cluster.devices) - sum(n.state_bytes for n in nodes)
        each = [n.forward_s + n.backward_input_s + n.backward_weight_s for n in nodes]
        work = count * sum(each) / len(self.cluster.devices)
        heads = accumulate((n.forward_s for n in nodes[:-1]), initial=0.0)
        path = max(through[0], *(head + count * own for head, own in zip(heads, each, strict=True)))
        return max(work, path, 0.0 if self.offload else count * held / spare)

    def searched(self, known: Sequence[ScheduleFamily], *, anneal: bool) -> tuple[float, str] | None:
        """The simulated step of the plan that is chosen among families, and its schedule; None if none fits."""
        options = SearchOptions(
            families=known, anneal=anneal, judge=simulated, budget=None if anneal else NAMED,
            offload="auto" if self.offload else "none",
        )  # fmt: skip
        try:
            found = plan(self.graph, self.cluster, self.microbatches, options)
        except (RequestError, InfeasibleError):
            return None
        return simulate(found).step_s, found.schedule


def problem_of(number: int) -> Problem:
    """The problem of a number: the same everywhere."""
    draw = random.Random(number)
    devices = draw.choice((2, 3, 4, 4, 6, 8))
    microbatches = devices * draw.choice((2, 3, 4))
    graph = _graph(draw, draw.randint(2 * devices, 5 * devices))
    work_s = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
    mean = sum(edge.bytes for edge in graph.edges) / len(graph.edges)
    messages = draw.choice((0.05, 0.1, 0.2, 0.4))  # of a stage's forward and backward, on a link of its own
    kind = draw.choice(("own links", "one switch", "two switches", "hosts"))
    share, offload = draw.choice((1.0, 0.8, 0.65, 0.5, 0.35)), kind == "hosts" and draw.random() < 0.5
    cluster = _cluster(kind, devices, mean / (messages * work_s / devices / 2), draw)
    plain = plan(
        graph, cluster, microbatches, SearchOptions(families=[find_family("1f1b")], anneal=False, budget=NAMED)
    ).predicted
    most = max(plain.peak_saved_bytes)
    limit = int(share * most + max(p - s for p, s in zip(plain.peak_memory_bytes, plain.peak_saved_bytes, strict=True)))
    cluster = evolve(cluster, devices=tuple(evolve(device, memory_bytes=limit) for device in cluster.devices))
    name = (f"{number}: {kind}, {devices} devices, {len(graph.nodes)} operators, {microbatches} microbatches, "
            f"{share:.0%}{', offload' * offload}")  # fmt: skip
    return Problem(name, graph, cluster, microbatches, offload)


def _graph(draw: random.Random, layers: int) -> OpGraph:
    uneven = draw.choice((0.1, 0.5, 1.0))

    def around(value: float) -> float:
        return value * draw.uniform(1 - uneven / 2, 1 + uneven)

    def operator(name: str, times: float, parameters: int) -> OpNode:
        return OpNode(
            name, around(times), around(1.1 * times), around(0.8 * times), 0.0, parameters, 4 * parameters,
            saved_bytes=int(around(1e7)), workspace_bytes=int(around(3e6)),
        )  # fmt: skip

    head = operator("head", draw.choice((1.0, 2.0, 4.0)) * 1e-3, 4_000_000)
    nodes = operator("embedding", 1e-4, 4_000_000), *(operator(f"layer{i}", 1e-3, 1_000_000) for i in range(layers))
    names = [node.name for node in (*nodes, head)]
    edges = [OpEdge(a, b, int(around(1e7))) for a, b in pairwise(names)]
    if draw.random() < 0.3:
        edges.append(OpEdge(names[0], names[-1], int(around(3e6))))
    return OpGraph((*nodes, head), tuple(edges))


def _cluster(kind: str, devices: int, rate: float, draw: random.Random) -> Cluster:
    latency_s = 1e-5
    if kind == "own links":
        return fully_connected(devices, AMPLE, rate, latency_s)
    places = tuple(Device(f"gpu{i}", AMPLE) for i in range(devices))
    if kind == "one switch":  # all cross the link of the switch to its host, as on a PCIe switch without peer access
        links = [Link(place.name, "pcie", rate, latency_s) for place in places]
        return Cluster(
            places, (Hub("pcie", "pcie"), Hub("host", "host")), (*links, Link("pcie", "host", rate, latency_s))
        )
    if kind == "two switches":
        hubs = Hub("left"), Hub("right")
        links = [Link(p.name, hubs[2 * i >= devices].name, 2 * rate, latency_s) for i, p in enumerate(places)]
        return Cluster(places, hubs, (*links, Link("left", "right", rate, latency_s)))
    groups = 2 if devices % 2 == 0 and draw.random() < 0.5 else 1
    hubs = tuple(Hub(f"host{g}", "host") for g in range(groups))
    links = [Link(p.name, hubs[i * groups // devices].name, rate, latency_s) for i, p in enumerate(places)]
    if groups == 2:
        links.append(Link("host0", "host1", rate / 2, latency_s, both_bytes_per_s=0.75 * rate))
    return Cluster(places, hubs, tuple(links))


def compared(number: int) -> tuple[list[str], float, float]:
    """A row, the ratio of the planner's step to that of the best named schedule, and to the bound."""
    problem = problem_of(number)
    known = list(families().values()) if problem.offload else resident_families()
    began = time.process_time()
    found = problem.searched(known, anneal=True)
    spent = time.process_time() - began
    named = {family.name: problem.searched([family], anneal=False) for family in known}
    name, best = min(((n, one[0]) for n, one in named.items() if one), key=lambda each: each[1], default=("none", 0.0))
    step, schedule = found or (float("inf"), "nothing fits")
    ratio = step / best if best else 1.0
    above = step / problem.bound_s
    return [
        problem.name, f"{step:.5f}", schedule[:24], name, f"{best:.5f}", f"{ratio:.4f}",
        "–" if found is None else f"{above - 1:.1%}", f"{spent:.1f}",
    ], ratio, above  # fmt: skip


def main() -> int:
    given = argument_parser(
        __doc__, cases=("0,60", "first and one past the last"), jobs=(1, "processes")
    ).parse_args()  # fmt: skip
    rows, ratios, above = [], [], []
    with ProcessPoolExecutor(given.jobs) as pool:
        for row, ratio, gap in pool.map(compared, range(*map(int, given.cases.split(",")))):
            rows.append(row)
            ratios.append(ratio)
            above += [gap] if gap < float("inf") else []
            print(" | ".join(row), flush=True)
    summary = (
        f"{len(ratios)} problems: at worst {max(ratios) - 1:+.2%} of the best named schedule's step, in the median "
        f"{statistics.median(ratios) - 1:+.2%}; above the bound {statistics.median(above) - 1:.1%} in the median, "
        f"{max(above) - 1:.1%} at worst"
    )
    header = ("problem", "planner s", "schedule", "best named", "s", "ratio", "above bound", "processor s")
    report(given.record, summary, header, rows)
    return int(max(ratios) > WORST)


if __name__ == "__main__":
    sys.exit(main())
