"""Plans for clusters whose links are shared: the chosen plan against every named schedule, all simulated.

Thirty clusters from a seed: devices on one switch, on two switches with a link between them, or on hosts with a network
card each; random graphs, with messages that take from a tenth to more than the time of a stage. For each, a plan with
the schedule ``auto`` is compared with the plan of every named schedule, by the simulator's step. The bound is 2 %.

    python benchmarks/planning/contention.py [--cases 0,5] [--record FILE]

A row has the contention-free prediction of the chosen plan, its simulated step, the best named schedule with its
simulated step, and the ratio of the two. The exit status is 1 if a ratio is above the bound.
"""

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import frozen
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.schedules.problem import ScheduleFamily
from panpipe.core.schedules.registry import resident_families
from panpipe.core.search.choose import plan
from panpipe.core.search.search_options import SearchOptions
from panpipe.simulators.oracle import simulated
from panpipe.simulators.run import simulate

from benchmarks.driver import argument_parser, report

CASES = 30
BOUND = 1.02
NAMED = 20_000
"""Evaluations for the cuts of a named schedule: more find nothing better for this few operators."""
HEADER = ("case", "predicted s", "simulated s", "best named", "simulated s", "ratio", "s")


@frozen
class Case:
    """A graph and a cluster with shared links.

    Args:
        name: for people.
        graph, cluster, microbatches: of the request.
    """

    name: str
    graph: OpGraph
    cluster: Cluster
    microbatches: int


def case_of(number: int) -> Case:
    """The case of a number: the same everywhere."""
    draw = random.Random(number)
    devices, microbatches = draw.choice((2, 3, 4, 4, 6, 8)), draw.choice((4, 8, 12, 16))
    operators = draw.randint(2 * devices, 6 * devices)
    graph = _graph(draw, operators)
    work_s = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
    # A message takes this share of a stage's forward and backward on a link of its own.
    share = draw.choice((0.1, 0.2, 0.4, 0.8))
    mean = sum(edge.bytes for edge in graph.edges) / len(graph.edges)
    rate = mean / (share * work_s / devices / 2)
    kind = draw.choice(("one switch", "two switches", "hosts"))
    cluster = _cluster(kind, devices, rate, 1e-5, draw)
    return Case(
        f"{number}: {kind}, {devices} devices, {microbatches} mb, messages {share:g}", graph, cluster, microbatches
    )


def _graph(draw: random.Random, operators: int) -> OpGraph:
    uneven = draw.choice((0.0, 0.5, 1.0))

    def around(value: float) -> float:
        return value * draw.uniform(1 - uneven / 2, 1 + uneven)

    nodes = tuple(
        OpNode(f"n{i}", around(1e-3), around(1e-3), around(1e-3), 0.0, 0, 0, saved_bytes=1000) for i in range(operators)
    )
    edges = [OpEdge(f"n{i}", f"n{i + 1}", int(around(1e7))) for i in range(operators - 1)]
    if draw.random() < 0.3:
        edges.append(OpEdge("n0", f"n{operators - 1}", int(around(3e6))))
    return OpGraph(nodes, tuple(edges))


def _cluster(kind: str, devices: int, rate: float, latency_s: float, draw: random.Random) -> Cluster:
    """Devices whose messages share links."""
    places = tuple(Device(f"gpu{i}", 10**12) for i in range(devices))
    if kind == "one switch":  # all cross the link of the switch to its host, as on a PCIe switch without peer access
        hubs = Hub("pcie", "pcie"), Hub("host", "host")
        links = [Link(place.name, "pcie", rate, latency_s) for place in places]
        return Cluster(places, hubs, (*links, Link("pcie", "host", rate, latency_s)))
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


def chosen_step_s(case: Case, families: list[ScheduleFamily], *, anneal: bool) -> tuple[float, float] | None:
    """Contention-free prediction and simulated step of the plan that is chosen among families; None for no plan."""
    budget = None if anneal else NAMED
    options = SearchOptions(families=families, anneal=anneal, judge=simulated, budget=budget)
    try:
        found = plan(case.graph, case.cluster, case.microbatches, options)
    except (RequestError, InfeasibleError):
        return None
    return found.predicted.step_s, simulate(found, memory=False).step_s


def compared(case: Case) -> tuple[list[str], float]:
    """A row of the table, and the ratio of the chosen plan's step to that of the best named schedule."""
    began = time.process_time()
    known = resident_families()
    auto = chosen_step_s(case, known, anneal=True)
    spent = time.process_time() - began
    assert auto is not None
    named = {family.name: chosen_step_s(case, [family], anneal=False) for family in known}
    name, best = min(((n, found[1]) for n, found in named.items() if found is not None), key=lambda each: each[1])
    ratio = auto[1] / best
    row = [case.name, f"{auto[0]:.5f}", f"{auto[1]:.5f}", name, f"{best:.5f}", f"{ratio:.4f}", f"{spent:.1f}"]
    return row, ratio


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", help="first and one past the last, such as 0,5")
    given = parser.parse_args()
    first, last = map(int, given.cases.split(",")) if given.cases else (0, CASES)
    rows, ratios = [], []
    for number in range(first, last):
        row, ratio = compared(case_of(number))
        rows.append(row)
        ratios.append(ratio)
        print(" | ".join(row), flush=True)
    summary = f"worst ratio {max(ratios):.4f}, median {statistics.median(ratios):.4f}, of {len(ratios)} clusters"
    report(given.record, summary, HEADER, rows)
    return int(max(ratios) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
