"""``offload="auto"`` compared with the best plan without offload, PO-H and PO-F, where memory is short; all simulated.

    python benchmarks/offload/offload_best.py CELLS [--cluster NAME] [--graph FILE] [--record FILE]

A cell is a cluster, a graph, k, and a share of 1F1B's memory for saved tensors. Six searches with the same budget find
its plans: without offload, with recomputation, every named schedule alone, PO-H, PO-F, and ``auto`` over everything.
Each finished cell is a line of CELLS, and a cell that is there is not searched again: a run may be ended and continued.

k is the round trip of saved tensors to the host, while all devices copy, ÷ the forward and backward that they are saved
for. Without ``--graph`` there are two equal layers for each device; the times of a graph file are scaled to give k.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import attrs
from offload import contended_links, graph_of
from panpipe.core.cluster.catalog.find import find_cluster
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.costs.graph import OpGraph, read_graph
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.plan.plan import Plan
from panpipe.core.schedules.problem import ScheduleFamily
from panpipe.core.schedules.registry import families, find_family, resident_families
from panpipe.core.search.choose import plan as search_plan
from panpipe.core.search.search_options import SearchOptions
from panpipe.simulators.oracle import simulated

from benchmarks.recording import machine, record
from tests.support.offload_clusters import RATE, SAVED, cluster_with_hosts

LESS_IDLE = 0.4
"""By how much, in the median, idle time has to be lower than without offload where memory is short."""
WITHOUT = ("none", "recompute", "named")
OTHERS = (*WITHOUT, "po-h", "po-f")


@attrs.frozen(slots=False)
class Cell:
    """A graph within a share of the memory that 1F1B needs for its saved tensors."""

    named: str
    file: str
    devices: int
    microbatches: int
    budget: int
    k: float
    share: float

    @cached_property
    def cluster(self) -> Cluster:
        return find_cluster(self.named) if self.named else cluster_with_hosts(self.devices)

    @cached_property
    def graph(self) -> OpGraph:
        if not self.file:
            return graph_of(2 * self.devices, self.k, self.round_trip_s(SAVED))
        graph = read_graph(self.file)
        work = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in graph.nodes)
        factor = self.round_trip_s(sum(node.saved_bytes for node in graph.nodes)) / self.k / work
        nodes = [
            attrs.evolve(
                node, forward_s=factor * node.forward_s, backward_input_s=factor * node.backward_input_s,
                backward_weight_s=factor * node.backward_weight_s, optimizer_s=factor * node.optimizer_s,
            )
            for node in graph.nodes
        ]  # fmt: skip
        return attrs.evolve(graph, nodes=tuple(nodes))

    def round_trip_s(self, size_bytes: float) -> float:
        """Time of some bytes to the host and back while all devices copy."""
        if not self.named:
            return 2 * size_bytes / RATE
        return max(link.out_s(size_bytes) + link.back_s(size_bytes) for link in contended_links(self.cluster))

    @cached_property
    def limit(self) -> float:
        """What the fullest device needs by 1F1B, with the share of its saved tensors."""
        options = self._options([find_family("1f1b")], None)
        found = search_plan(self.graph, self.cluster, self.microbatches, options).predicted
        pairs = list(zip(found.peak_memory_bytes, found.peak_saved_bytes, strict=True))
        return max(peak - saved for peak, saved in pairs) + self.share * max(saved for _, saved in pairs)

    @property
    def ideal_s(self) -> float:
        """The work of a device."""
        nodes = self.graph.nodes
        work = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in nodes)
        return self.microbatches * work / len(self.cluster.devices)

    def _options(
        self,
        found: Sequence[ScheduleFamily],
        limit: float | None,
        recompute: str | None = "none",
        offload: str = "none",
    ) -> SearchOptions:
        """One schedule is not annealed."""
        anneal = len(found) > 1
        return SearchOptions(
            families=found, oracle=simulated, recompute=recompute, offload=offload, anneal=anneal, memory_limit=limit,
            budget=self.budget if anneal else max(self.budget // 4, 1), alternatives=False,
        )  # fmt: skip

    def plan(
        self, found: Sequence[ScheduleFamily], recompute: str | None = "none", offload: str = "none"
    ) -> Plan | None:
        """The best plan that fits; None if there is none, or the family builds no schedule within the limit."""
        try:
            options = self._options(found, self.limit, recompute, offload)
            return search_plan(self.graph, self.cluster, self.microbatches, options)
        except (InfeasibleError, RequestError):
            return None

    def steps(self) -> dict[str, float]:
        """Step ÷ work of a device, by kind of plan; infinite where none fits."""
        resident = resident_families()
        named = [self.plan([family]) for family in resident if family.name != "building-block"]
        plans = {
            "none": [self.plan(resident)], "recompute": [self.plan(resident, None)], "named": named,
            "po-h": [self.plan([find_family("po-h")])], "po-f": [self.plan([find_family("po-f")])],
            "auto": [self.plan(list(families().values()), None, "auto")],
        }  # fmt: skip
        return {
            kind: min((plan.predicted.step_s / self.ideal_s for plan in own if plan is not None), default=inf)
            for kind, own in plans.items()
        }


def known(path: Path) -> dict[Cell, dict[str, float]]:
    """The cells of a file."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        values = json.loads(line)
        steps = {kind: inf if step is None else float(step) for kind, step in values.pop("steps").items()}
        found[Cell(**values)] = steps
    return found


def line_of(cell: Cell, steps: dict[str, float]) -> str:
    """A line of the file of cells; null is a kind of which no plan fits."""
    finite = {kind: None if step == inf else round(step, 6) for kind, step in steps.items()}
    return json.dumps({**attrs.asdict(cell), "steps": finite})


def less_idle(steps: dict[str, float]) -> float | None:
    """By how much idle time is lower than without offload; None where nothing fits without."""
    without = min(steps[kind] for kind in WITHOUT)
    return None if without == inf else 1 - (steps["auto"] - 1) / (without - 1)


def not_slower(steps: dict[str, float]) -> bool:
    return steps["auto"] <= min(steps[kind] for kind in OTHERS) * (1 + 1e-6)


def row_of(cell: Cell, steps: dict[str, float]) -> list[str]:
    gain = less_idle(steps)
    where = cell.named or f"{cell.devices} devices"
    return [
        where if not cell.file else f"{where}, {Path(cell.file).stem}", f"{cell.k:g}", f"{cell.share:.2f}",
        *(f"{steps[kind]:.3f}" for kind in (*OTHERS, "auto")), "" if gain is None else f"{gain:.0%}",
        "yes" if not_slower(steps) else "no",
    ]  # fmt: skip


HEADER = (
    "cluster", "k", "memory of 1F1B's", *OTHERS, "auto", "less idle than without offload", "auto not slower",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path, help="JSON lines: finished cells are read, and new ones appended")
    parser.add_argument("--k", default="0.2,0.5,1,2,4", help="values of k, with commas between")
    parser.add_argument("--shares", default="0.5,0.33,0.25", help="shares of 1F1B's memory")
    parser.add_argument("--devices", type=int, default=4, help="devices, without --cluster")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--budget", type=int, default=300, help="evaluations of each search")
    parser.add_argument("--cluster", default="", help="a cluster of the catalogue, and all of its devices")
    parser.add_argument("--graph", default="", help="an operator graph instead of equal layers")
    parser.add_argument("--record", help="append the table of all cells of the file to this Markdown file")
    options = parser.parse_args()
    devices = len(find_cluster(options.cluster).devices) if options.cluster else options.devices
    found = known(options.cells)
    for k in map(float, options.k.split(",")):
        for share in map(float, options.shares.split(",")):
            cell = Cell(options.cluster, options.graph, devices, options.microbatches, options.budget, k, share)
            if cell not in found:
                found[cell] = cell.steps()
                with options.cells.open("a", encoding="utf-8") as file:
                    file.write(line_of(cell, found[cell]) + "\n")
                print(" | ".join(row_of(cell, found[cell])), flush=True)
    rows = [row_of(cell, steps) for cell, steps in found.items()]
    gains = [
        gain
        for cell, steps in found.items()
        if cell.k <= 1 and cell.share <= 0.5 and (gain := less_idle(steps)) is not None
    ]
    lost = sum(not not_slower(steps) for steps in found.values())
    middle = f"{median(gains):.0%} in the median of {len(gains)} cells with k ≤ 1" if gains else "no cell with k ≤ 1"
    title = f"Step ÷ work of a device: auto is slower in {lost} of {len(found)} cells; less idle: {middle}"
    print(title)
    if options.record:
        record(options.record, title, machine(), HEADER, rows)
    sys.exit(0 if not lost and (not gains or median(gains) >= LESS_IDLE) else 1)


if __name__ == "__main__":
    main()
