"""Published figures against the simulator, from the catalogue alone: nothing is fitted to any row.

Pipeline Parallelism with Controllable Memory (arXiv 2405.15362, Figure 7): GPT-2 of transformers with 30 layers in
bfloat16, its attention written out, on 16 GPUs in two nodes; costs are those that ``panpipe plan`` has for it. Stages
are cut as in the paper: embedding, layers and head count as one each, and each stage has equally many of them.
Throughput is by stage span, the time from one step to the next: its code steps optimizers without a barrier and
corrects them afterwards (post-validation, Zero Bubble section 4). 1F1B and interleaved 1F1B gain nothing by that, their
first device being the last to end. Asserted are the orderings that the paper shows.

    python benchmarks/published/papers.py [--record FILE]
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from panpipe.answers.plan.costs import model_costs
from panpipe.answers.plan.options import PlanOptions
from panpipe.benchmarks.driver import argument_parser, report
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.costs.costs import stage_costs, stage_edges
from panpipe.core.costs.graph import OpGraph
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.problem.assemble import assemble
from panpipe.core.search.problem.blocks import Blocks
from panpipe.simulators.result import SimulationResult
from panpipe.simulators.run import simulate

CONFIG = {
    "model_type": "gpt2", "n_layer": 30, "n_embd": 5120, "n_head": 40, "vocab_size": 50304, "n_positions": 1024,
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
SAMPLES, MICROBATCHES, CLUSTER = 2, 64, find_cluster("2x8xA100-80GB")
MEGATRON = {"rounds": 4}
"""Megatron's interleaving, which the paper ran: rounds of as many microbatches as devices, 64 ÷ 16."""
FIGURE_7: dict[str, tuple[str, int, dict[str, int], float, int]] = {
    "ZB-2P": ("zb-2p", 1, {}, 52.5, 48),
    "V-ZB": ("zb-v", 2, {}, 51.0, 23),
    "1F1B-I": ("interleaved-1f1b", 2, MEGATRON, 48.5, 36),
    "ZB-1P": ("zb-1p", 1, {}, 48.5, 25),
    "V-Half": ("v-half", 2, {}, 46.5, 14),
    "1F1B": ("1f1b", 1, {}, 43.5, 23),
    "V-Min": ("v-min", 2, {}, 40.5, 10),
}
"""The paper's name → our family, its stages a device and parameters; published model-FLOPs utilisation in percent and
activation memory in GB."""


def simulated(graph: OpGraph, family: str, chunks: int, parameters: Mapping[str, Any]) -> SimulationResult:
    """One step of a schedule over stages of as many units each."""
    devices = len(CLUSTER.devices)
    parts = [node.name for node in graph.nodes]
    count = devices * chunks
    each, rest = divmod(len(parts), count)
    assert not rest, f"{len(parts)} units in {count} stages"
    stages = [parts[i : i + each] for i in range(0, len(parts), each)]
    costs, edges = stage_costs(graph, stages), stage_edges(graph, stages)
    hop_s = CLUSTER.transfer_s(0, 1, max(edge.bytes for edge in edges))
    schedule = find_family(family).build(ScheduleProblem(devices, MICROBATCHES, chunks, costs, hop_s), **parameters)
    return simulate(assemble(graph, stages, schedule), costs, CLUSTER)


def graph_and_work_s() -> tuple[OpGraph, float]:
    """The model with a node for each unit, and the seconds of its FLOPs at the peak of all devices."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(CONFIG), encoding="utf-8")
        options = PlanOptions(
            cluster="2x8xA100-80GB", model=str(file), batch=SAMPLES * MICROBATCHES, sequence=CONFIG["n_positions"],
            dtype="bf16",
        )  # fmt: skip
        costs = model_costs(options, CLUSTER, MICROBATCHES)
    assert costs.work.flops is not None
    assert costs.peak_flops_per_s is not None
    return Blocks.of(costs.graph, "layers").joined(costs.graph), costs.work.flops / sum(costs.peak_flops_per_s)


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
    graph, work_s = graph_and_work_s()
    found = {name: simulated(graph, *given[:3]) for name, given in FIGURE_7.items()}
    rate = {name: work_s / result.stage_span_s for name, result in found.items()}
    # The paper has V-Min 7 % below 1F1B. Here it is 3 % below: V-Min sends twice as many messages, and the simulator
    # does not slow the computation that they overlap.
    descending(rate, ["ZB-2P"], ["V-ZB"], ["1F1B-I", "ZB-1P"], ["V-Half"], ["1F1B"], ["V-Min"], tied=0.03)
    held = {name: max(result.peak_saved_bytes) for name, result in found.items()}
    descending(held, ["ZB-2P"], ["1F1B-I"], ["1F1B", "V-ZB"], ["V-Half"], ["V-Min"], tied=0.08)
    return [
        [name, family, f"{mfu:.1f}", f"{100 * rate[name]:.1f}", str(gb), f"{held[name] / 1e9:.1f}",
         f"{found[name].stage_span_s:.3f}"]
        for name, (family, _, _, mfu, gb) in FIGURE_7.items()
    ]  # fmt: skip


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    header = ("schedule", "family", "paper MFU %", "here MFU %", "paper GB", "here GB", "step s")
    report(arguments.record, "Controllable Memory, Figure 7: 9.6B on 16 A100-80GB", header, controllable_memory())


if __name__ == "__main__":
    main()
