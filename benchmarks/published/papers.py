"""Published figures against the simulator, from the catalogue alone: nothing is fitted to any row.

The papers' models are GPT-2 of transformers in bfloat16, with attention written out for the first and as a flash kernel
for the second; costs are those that ``panpipe plan`` has for them. Stages are cut as in the papers: embedding, layers
and head count as one each, and each stage has equally many of them. The simulator runs every schedule on the cluster.

Pipeline Parallelism with Controllable Memory (arXiv 2405.15362, Figure 7): 30 layers on 16 GPUs in two nodes.
Throughput is by stage span, the time from one step to the next: its code steps optimizers without a barrier and
corrects them afterwards (post-validation, Zero Bubble section 4). 1F1B and interleaved 1F1B gain nothing by that, their
first device being the last to end. PipeOffload (arXiv 2503.01328, Table 2): 38 layers on 8 GPUs.

Asserted are the orderings and ratios that the papers show; printed figures of the papers are rounded, and ratios of
them are met within that rounding.

    python benchmarks/published/papers.py [--record FILE]
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attrs import field, frozen
from panpipe.answers.plan.costs import model_costs
from panpipe.answers.plan.options import PlanOptions
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.costs.costs import stage_costs, stage_edges
from panpipe.core.costs.graph import OpGraph
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.blocks import Blocks
from panpipe.simulators.result import SimulationResult
from panpipe.simulators.run import simulate

from benchmarks.driver import argument_parser, report


@frozen
class Case:
    """A schedule as a paper names it.

    Args:
        title: the paper's name.
        family: ours.
        chunks: stages a device.
        parameters: of the family.
    """

    title: str
    family: str
    chunks: int = 1
    parameters: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen
class Shape:
    """Sizes of a GPT and of its microbatches; ``flash``: whether attention is one kernel."""

    layers: int
    sequence: int
    samples: int
    flash: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """As in a config.json."""
        written_out = {} if self.flash else {"attn_implementation": "eager"}
        return {"model_type": "gpt2", "n_layer": self.layers, "n_embd": 5120, "n_head": 40, "vocab_size": 50304,
                "n_positions": self.sequence, "tie_word_embeddings": False, **written_out}  # fmt: skip


MEGATRON = {"rounds": 4}
"""Megatron's interleaving, which both papers ran: rounds of as many microbatches as devices, 64 ÷ 16 and 32 ÷ 8."""

CONTROLLABLE = Shape(layers=30, sequence=1024, samples=2)
CONTROLLABLE_CLUSTER, CONTROLLABLE_MICROBATCHES = "2x8xA100-80GB", 64
FIGURE_7 = {
    Case("ZB-2P", "zb-2p"): (52.5, 48),
    Case("V-ZB", "zb-v", 2): (51.0, 23),
    Case("1F1B-I", "interleaved-1f1b", 2, MEGATRON): (48.5, 36),
    Case("ZB-1P", "zb-1p"): (48.5, 25),
    Case("V-Half", "v-half", 2): (46.5, 14),
    Case("1F1B", "1f1b"): (43.5, 23),
    Case("V-Min", "v-min", 2): (40.5, 10),
}
"""Model-FLOPs utilisation in percent and activation memory in GB."""

OFFLOAD_LENGTHS = (4096, 8192, 16384)
OFFLOAD_CLUSTER, OFFLOAD_MICROBATCHES, OFFLOAD_CHUNKS = "8xA100-80GB", 32, 5
TABLE_2 = {
    Case("1F1B", "1f1b"): (12, 24, 48),
    Case("1F1B-I", "interleaved-1f1b", OFFLOAD_CHUNKS, MEGATRON): (15, 30, None),
    Case("GIS", "gis", OFFLOAD_CHUNKS): (13, 27, None),
    Case("GIS-H", "gis-h", OFFLOAD_CHUNKS): (8, 16, 32),
}
"""Activation memory in GB at each length; None is out of memory."""


@frozen
class Row:
    """What a schedule does here: model-FLOPs utilisation, step in seconds, and most saved tensors of a device."""

    utilisation: float
    step_s: float
    saved_bytes: float


def simulated(graph: OpGraph, case: Case, cluster_name: str, microbatches: int) -> SimulationResult:
    """One step of a schedule over stages of as many units each."""
    cluster = find_cluster(cluster_name)
    devices = len(cluster.devices)
    parts = [node.name for node in graph.nodes]
    count = devices * case.chunks
    each, rest = divmod(len(parts), count)
    assert not rest, f"{len(parts)} units in {count} stages"
    stages = [parts[i : i + each] for i in range(0, len(parts), each)]
    costs, edges = stage_costs(graph, stages), stage_edges(graph, stages)
    hop_s = cluster.transfer_s(0, 1, max(edge.bytes for edge in edges))
    problem = ScheduleProblem(devices, microbatches, case.chunks, costs, hop_s)
    schedule = find_family(case.family).build(problem, **case.parameters)
    return simulate(assemble(graph, stages, schedule), costs, cluster)


def rows(shape: Shape, cases: Iterable[Case], cluster: str, microbatches: int) -> dict[str, Row]:
    """Every case on its cluster, by the paper's name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(shape.config), encoding="utf-8")
        options = PlanOptions(
            cluster=cluster, model=str(file), batch=shape.samples * microbatches, sequence=shape.sequence, dtype="bf16"
        )
        costs = model_costs(options, find_cluster(cluster), microbatches)
    graph = Blocks.of(costs.graph, "layers").joined(costs.graph)
    assert costs.work.flops is not None
    assert costs.peak_flops_per_s is not None
    found = {}
    for case in cases:
        result = simulated(graph, case, cluster, microbatches)
        total = costs.work.flops / sum(costs.peak_flops_per_s)
        found[case.title] = Row(total / result.stage_span_s, result.stage_span_s, max(result.peak_saved_bytes))
    return found


def descending(values: Mapping[str, float], *groups: Sequence[str], tied: float = 0.0) -> None:
    """Assert that every value of a group is above every one of the next."""
    for above, below in pairwise(groups):
        for a in above:
            for b in below:
                assert values[a] > values[b], f"{a} {values[a]:.4g} is not above {b} {values[b]:.4g}"
    for group in groups:
        spread = max(values[name] for name in group) / min(values[name] for name in group)
        assert spread <= 1 + tied, f"{' and '.join(group)} differ by {spread - 1:.1%}"


def controllable_memory() -> list[list[str]]:
    """Figure 7: the rows, and what they assert."""
    found = rows(CONTROLLABLE, FIGURE_7, CONTROLLABLE_CLUSTER, CONTROLLABLE_MICROBATCHES)
    rate = {name: row.utilisation for name, row in found.items()}
    # The paper has V-Min 7 % below 1F1B. Here it is 3 % below: V-Min sends twice as many messages, and the simulator
    # does not slow the computation that they overlap.
    descending(rate, ["ZB-2P"], ["V-ZB"], ["1F1B-I", "ZB-1P"], ["V-Half"], ["1F1B"], ["V-Min"], tied=0.03)
    held = {name: row.saved_bytes for name, row in found.items()}
    descending(held, ["ZB-2P"], ["1F1B-I"], ["1F1B", "V-ZB"], ["V-Half"], ["V-Min"], tied=0.08)
    return [
        [case.title, case.family, f"{mfu:.1f}", f"{100 * rate[case.title]:.1f}", str(gb),
         f"{held[case.title] / 1e9:.1f}", f"{found[case.title].step_s:.3f}"]
        for case, (mfu, gb) in FIGURE_7.items()
    ]  # fmt: skip


def within_rounding(ratio: float, value: int, base: int) -> bool:
    """Whether a ratio is one of two printed whole numbers, each rounded."""
    return (value - 0.5) / (base + 0.5) <= ratio <= (value + 0.5) / (base - 0.5)


def offload() -> list[list[str]]:
    """Table 2: the rows, and what they assert."""
    table = []
    for column, length in enumerate(OFFLOAD_LENGTHS):
        shape = Shape(layers=38, sequence=length, samples=1, flash=True)
        found = rows(shape, TABLE_2, OFFLOAD_CLUSTER, OFFLOAD_MICROBATCHES)
        base = found["1F1B"].saved_bytes
        printed_base = TABLE_2[next(iter(TABLE_2))][column]
        for case, printed in TABLE_2.items():
            ratio, value = found[case.title].saved_bytes / base, printed[column]
            if value is not None:
                assert within_rounding(ratio, value, printed_base), f"{case.title} at {length}: {ratio:.3f}"
            expected = "out of memory" if value is None else f"{value}/{printed_base} = {value / printed_base:.2f}"
            size = f"{found[case.title].saved_bytes / 1e9:.1f}"
            table.append([str(length), case.title, expected, f"{ratio:.3f}", size])
    return table


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    tables = (
        ("Controllable Memory, Figure 7: 9.6B on 16 A100-80GB",
         ("schedule", "family", "paper MFU %", "here MFU %", "paper GB", "here GB", "step s"), controllable_memory()),
        ("PipeOffload: 10.5B on 8 A100, activations over 1F1B's",
         ("sequence", "schedule", "paper", "here", "here GB"), offload()),
    )  # fmt: skip
    for title, header, lines in tables:
        report(arguments.record, title, header, lines)


if __name__ == "__main__":
    main()
