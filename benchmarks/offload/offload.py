"""Offload in plans, against bounds of PipeOffload and of panpipe. Steps and peaks are simulated; no device is used.

    python benchmarks/offload/offload.py PART [--record FILE] [--svg FILE]

==========  ========================================================================================================
free        PO-F and PO-H on links with k from 0.2 to 2: the step with copies against the same orders without
depth       PO-F and PO-H from 4 to 64 devices: passes that are held, against the papers' table
scaling     a model that grows with the devices: saved tensors of a device under 1F1B and with offload (``--svg``)
neighbours  two devices on one PCIe switch: copies planned in turns, and by each device on its own
catalogue   ``free`` on clusters of the catalogue, with and without NVLink, over PCIe and over NVLink-C2C
==========  ========================================================================================================

k is the round trip of saved tensors to the host ÷ the forward and backward that they are saved for. The graphs have
equal layers of four operators. Every device has an NVLink port and a link to its host, alone or with a neighbour;
``catalogue`` takes clusters of the catalogue, whose k is for the rates while all devices copy.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import attrs
from offload_plot import weak_scaling_svg
from panpipe.core.cluster.catalog.find import find_cluster
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.costs import StageCosts, stage_costs, stage_edges
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.offload.choice import Picks, everything, of_stages
from panpipe.core.offload.host_links import HostLink, host_links
from panpipe.core.offload.plan_offload import offloadable, with_offload
from panpipe.core.offload.storages import graph_storages
from panpipe.core.plan.plan import Plan
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score
from panpipe.core.search.problem.assemble import assemble
from panpipe.simulators.oracle import simulated
from panpipe.simulators.result import SimulationResult

from benchmarks.recording import machine, record
from tests.support.offload_clusters import RATE, SAVED, cluster_with_hosts

PARTS = 4
"""Operators of a layer."""
STATE = 4 << 20
"""Bytes of parameters, gradients and optimizer state of a layer."""
WORKSPACE = 1 << 20
LONGER = 0.02
"""By how much copies may lengthen a step where the link carries them."""

Row = list[str]
Part = tuple[str, tuple[str, ...], list[Row], bool]
"""Title, header, rows, and whether the bounds are kept."""


def graph_of(layers: int, k: float, round_trip_s: float = 2 * SAVED / RATE) -> OpGraph:
    """Equal layers whose saved tensors take k times as long to the host and back as their forward and backward."""
    each = round_trip_s / k / 3 / PARTS
    nodes = tuple(
        OpNode(
            f"layer.{i // PARTS}.{i % PARTS}", each, each, each, parameter_bytes=STATE // PARTS // 4,
            state_bytes=STATE // PARTS, saved_bytes=SAVED // PARTS, workspace_bytes=WORKSPACE,
        )
        for i in range(PARTS * layers)
    )  # fmt: skip
    edges = tuple(OpEdge(a.name, b.name, 1 << 20) for a, b in itertools.pairwise(nodes))
    return OpGraph(nodes, edges, name=f"{layers} layers, k = {k:g}")


CATALOGUE = ("8xA100-40GB", "8xA100-PCIe-40GB", "8xH100", "8xL40S", "4xGH200", "4xGB200")


def round_trip_s(name: str) -> float:
    """Time of a layer's saved tensors to the host and back while all devices of a cluster of the catalogue copy."""
    cluster = find_cluster(name)
    links = contended_links(cluster)
    return max(link.out_s(SAVED) + link.back_s(SAVED) for link in links)


def contended_links(cluster: Cluster) -> list[HostLink]:
    """The ways of all devices to their hosts while all of them copy."""
    plan = Case("po-f", len(cluster.devices), 2, len(cluster.devices), 1.0).plan()[0]
    found = [link for link in host_links(plan, cluster).contended().links if link is not None]
    assert len(found) == len(cluster.devices)
    return found


@attrs.frozen
class Case:
    """A named schedule of equal layers on even cuts."""

    name: str
    devices: int
    chunks: int
    microbatches: int
    k: float
    per_switch: int = 1
    named: str = ""

    @property
    def cluster(self) -> Cluster:
        return find_cluster(self.named) if self.named else cluster_with_hosts(self.devices, per_switch=self.per_switch)

    @property
    def graph(self) -> OpGraph:
        """Two layers for each device where a device has at most two stages; otherwise one for each stage."""
        layers = self.devices * max(self.chunks, 2)
        return graph_of(layers, self.k, round_trip_s(self.named)) if self.named else graph_of(layers, self.k)

    @property
    def offload(self) -> dict[int, float]:
        """The stages that the schedule offloads."""
        schedule = find_family(self.name).build(ScheduleProblem(self.devices, self.microbatches, self.chunks))
        return dict(schedule.offload)

    def plan(self) -> tuple[Plan, tuple[StageCosts, ...]]:
        """The plan without offload, and its stages' costs."""
        graph, stages = self.graph, self.devices * self.chunks
        size = len(graph.nodes) // stages
        names = [[node.name for node in graph.nodes[s * size : (s + 1) * size]] for s in range(stages)]
        costs = stage_costs(graph, names)
        problem = ScheduleProblem(self.devices, self.microbatches, self.chunks, costs)
        schedule = find_family(self.name).build(problem)
        return assemble(graph, names, schedule, edges=stage_edges(graph, names)), costs

    def offloaded(self, pick: Picks, *, slowed: bool = False) -> Plan:
        """The plan with copies; ``slowed``: planned for links that all devices use at once."""
        plan, costs = self.plan()
        storages = graph_storages(self.graph, [stage.nodes for stage in plan.stages], costs)
        task = offloadable(plan, costs, self.cluster, storages)
        return with_offload(plan, task.slowed if slowed else task, pick)


def passes(peaks: Sequence[float], case: Case) -> float:
    """A peak of saved tensors, in those of one stage for one microbatch."""
    layers = len(case.graph.nodes) // PARTS
    return max(peaks) / (SAVED * layers / (case.devices * case.chunks))


def free(shapes: Sequence[tuple[int, int, str]] = ((4, 2, ""), (8, 2, ""), (8, 4, ""))) -> Part:
    """PO-F and PO-H: devices, stages on each, and a cluster of the catalogue."""
    rows, kept = [], True
    for devices, chunks, named in shapes:
        for name, ks in (("po-f", (0.2, 0.5, 0.8, 1.0)), ("po-h", (0.5, 1.0, 1.5, 2.0))):
            for k in ks:
                case = Case(name, devices, chunks, 4 * devices, k, named=named)
                resident, costs = case.plan()
                pick = everything if name == "po-f" else of_stages(case.offload)
                before = simulated(resident, costs, case.cluster)
                tried: list[tuple[float, Plan, SimulationResult]] = []
                for slowed in (False, True) if named else (False,):  # the search tries both
                    moving = case.offloaded(pick, slowed=slowed)
                    after = simulated(moving, costs, case.cluster)
                    tried.append((after.step_s, moving, after))
                    if after.step_s <= (1 + LONGER) * before.step_s:
                        break
                _, moving, after = min(tried, key=lambda each: each[0])
                longer = after.step_s / before.step_s - 1
                copied = sum(len(each.copies) for each in moving.memory.offload)
                kept &= longer <= LONGER
                held = (f"{passes(each.peak_saved_bytes, case):.1f}" for each in (before, after))
                share = copied / (len(case.offload) * case.microbatches)
                what = f"{name}, {named or devices} × {chunks}, {case.microbatches} microbatches"
                rows.append([what, f"{k:g}", f"{longer:+.2%}", f"{share:.0%}", *held])
    header = ("schedule, devices × stages", "k", "step", "of the microbatches copied", "passes without", "with")
    where = ", on clusters of the catalogue" if shapes[0][2] else ""
    return f"Copies that cost nothing (a step may be 2 % longer){where}", header, rows, kept


def depth() -> Part:
    """PO-F and PO-H from 4 to 64 devices, with two stages on each."""
    rows, kept = [], True
    for devices in (4, 8, 16, 32, 64):
        cells = [str(devices)]
        for name, k in (("po-f", 0.5), ("po-f", 1.0), ("po-h", 1.0), ("po-h", 2.0)):
            costs = (StageCosts(1, 1, 1, saved_bytes=1),) * (2 * devices)
            problem = ScheduleProblem(devices, 2 * devices, 2, costs, copy_s_per_byte=1.5 * k)
            schedule = find_family(name).build(problem)
            found, resident = score(problem, schedule), score(problem, attrs.evolve(schedule, offload=()))
            peak, table = max(found.result.peak_memory), 4 if name == "po-f" else (2 + 2) / 8 * devices
            slower = found.result.makespan / resident.result.makespan - 1
            kept &= slower <= LONGER and (name == "po-h" or peak <= table)
            cells.append(f"{peak:g} (table {table:g}), {slower:+.1%}")
        rows.append(cells)
    header = ("devices", "PO-F, k 0.5", "PO-F, k 1", "PO-H, k 1", "PO-H, k 2")
    return "Passes held with two stages on each device, and the step", header, rows, kept


def scaling(svg: Path | None) -> Part:
    """Two layers for each device, twice as many microbatches as devices.

    The model grows with the devices, so the picture shows the saved tensors of a device as a share of those of the
    whole model for one microbatch.
    """
    titles = {"1f1b": "1F1B", "gis-h": "GIS-H", "po-h": "PO-H", "po-f": "PO-F"}
    rows: list[Row] = []
    series: dict[str, list[tuple[int, float]]] = {title: [] for title in titles.values()}
    for devices in (4, 8, 16, 32):
        cells = [str(devices)]
        for name, title in titles.items():
            case = Case(name, devices, 1 if name == "1f1b" else 2, 2 * devices, 0.8)
            resident, costs = case.plan()
            plan = case.offloaded(of_stages(case.offload)) if case.offload else resident
            result = simulated(plan, costs, case.cluster)
            held = max(result.peak_saved_bytes)
            share = held / (SAVED * len(case.graph.nodes) / PARTS)
            series[title].append((devices, share))
            cells.append(f"{held / 1e9:.2f} GB ({share:.1%}), {result.step_s:.3g} s")
        rows.append(cells)
    if svg is not None:
        svg.write_text(weak_scaling_svg(series), encoding="utf-8")
    first, last = ({title: points[at][1] for title, points in series.items()} for at in (0, -1))
    kept = last["PO-F"] < first["PO-F"] / 4 and last["1F1B"] > 0.99 * first["1F1B"]
    header = ("devices", *(f"{title}: saved tensors of a device (of the model), step" for title in titles.values()))
    return "Weak scaling: two layers for each device, k 0.8", header, rows, kept


def neighbours() -> Part:
    """PO-F on pairs of devices that share the link to their host."""
    rows, kept = [], True
    for devices, k in ((4, 0.3), (4, 0.5), (8, 0.3), (8, 0.5), (8, 0.8)):
        case = Case("po-f", devices, 2, 4 * devices, k, per_switch=2)
        resident, costs = case.plan()
        cells = [str(devices), f"{k:g}", f"{simulated(resident, costs, case.cluster).step_s:.4g} s"]
        plans = [case.offloaded(everything, slowed=slowed) for slowed in (False, True)]
        results = [simulated(plan, costs, case.cluster) for plan in plans]
        cells += [f"{each.step_s:.4g} s, {passes(each.peak_saved_bytes, case):.1f} passes" for each in results]
        kept &= min(each.step_s for each in results) <= (1 + LONGER) * simulated(resident, costs, case.cluster).step_s
        rows.append(cells)
    header = ("devices", "k alone", "without copies", "each as if alone", "each at half the rate")
    return "Pairs of devices on one PCIe switch with one link to the host", header, rows, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("free", "depth", "scaling", "neighbours", "catalogue"))
    parser.add_argument("--clusters", default=",".join(CATALOGUE), help="catalogue: names, with commas between")
    parser.add_argument("--svg", type=Path, help="scaling: write the plot here")
    parser.add_argument("--record", help="append the result to this Markdown file")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], Part]] = {
        "free": free, "depth": depth, "neighbours": neighbours, "scaling": lambda: scaling(arguments.svg),
        "catalogue": lambda: free([(len(find_cluster(n).devices), 2, n) for n in arguments.clusters.split(",")]),
    }  # fmt: skip
    title, header, rows, kept = parts[arguments.part]()
    print(" | ".join(header))
    for row in rows:
        print(" | ".join(row))
    print("all bounds kept" if kept else "NOT all bounds kept")
    if arguments.record:
        record(arguments.record, title, machine(), header, rows)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
