"""Saved tensors that each schedule holds, predicted and measured, and its step time: the benchmark GPT on four devices.

The devices are threads of one process, one core thread each. All schedules run the same cut, the papers' own: as many
layers for every device, two in one stage for 1F1B, and a layer in each of two stages for those folded over the devices.
The first stage has the embeddings, the last one the head and the loss. Measured values come from finalizers of the
saved tensors' storages during a step; predicted ones from the plan.

Ratios are to 1F1B's peak in the same run. The published ones are those of the papers' uniform model at four devices:
1F1B and ZB-V hold p microbatches, V-Half (p + 2) // 2 and V-Min (p + 4) // 3 (Controllable Memory, section 3). The
logits make this model's last stage heavier; in the folded schedules it shares the first device, and one microbatch of
it is among those held there. "Published, here" counts that. With more workers than cores, step times compare the
schedules' total work more than their bubbles.

    python benchmarks/runtime/schedule_memory.py [--steps 5] [--record FILE]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
from attrs import evolve
from panpipe.core.capture.export.operators import Operators, operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.costs.costs import stage_costs
from panpipe.core.costs.graph import OpNode
from panpipe.core.plan.plan import plan_json, read_plan
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import choose_schedule
from panpipe.core.search.search_options import SearchOptions
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.profile.measured_cluster import measured_cluster
from panpipe.runtimes.profile.operator_profile import profile_operators
from panpipe.runtimes.programs.compiled import compile_stages
from panpipe.simulators.oracle import simulated

from benchmarks import gpt
from benchmarks.driver import argument_parser, report

DEVICES = 4
PUBLISHED = {"1f1b": 4, "zb-v": 4, "v-half": (DEVICES + 2) // 2, "v-min": (DEVICES + 4) // 3}
"""Microbatches of a device's whole share that each schedule holds at most."""


def layer_of(node: OpNode) -> int | None:
    """The layer that a node's parameters belong to."""
    found = [re.match(r"blocks\.(\d+)\.", name) for name in node.parameters]
    return next((int(match.group(1)) for match in found if match), None)


def cut(operators: Operators, stages: int) -> list[list[str]]:
    """As many layers for each stage; what belongs to no layer stays with the layer before it."""
    found: list[list[str]] = [[] for _ in range(stages)]
    layer = 0
    for node in operators.graph.nodes:
        own = layer_of(node)
        layer = layer if own is None else own
        found[layer * stages // gpt.LAYERS].append(node.name)
    return found


def write_plans(folder: Path) -> None:
    """Profile both cuts, and write a plan for each schedule."""
    torch.set_num_threads(1)
    model, batch = gpt.make(), gpt.data()
    rows = gpt.ROWS // gpt.MICROBATCHES
    microbatch = tuple(tensor[:rows] for tensor in batch)
    operators = operators_of(capture_step(model, gpt.step, microbatch))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    graph = profile_operators(operators, parameters, buffers, microbatch)
    cluster = measured_cluster(ThreadTeam(DEVICES), torch.device("cpu"))
    sizes = {name: tensor_bytes(parameter) for name, parameter in parameters.items()}
    for count, names in ((DEVICES, ["1f1b"]), (2 * DEVICES, [name for name in PUBLISHED if name != "1f1b"])):
        stages = cut(operators, count)
        compiled = compile_stages(operators, stages, range(count))
        sums, memory = stage_costs(graph, stages), {i: programs.memory for i, programs in compiled.programs.items()}
        costs = [
            evolve(
                sums[i], saved_bytes=memory[i].saved, freed_by_input_bytes=memory[i].freed_by_input,
                created_by_input_bytes=memory[i].created_by_input, workspace_bytes=memory[i].workspace,
                input_bytes=memory[i].inputs, shared_bytes=memory[i].shared,
            )
            for i in range(count)
        ]  # fmt: skip
        for name in names:
            plan = choose_schedule(
                graph, stages, costs, cluster, gpt.MICROBATCHES,
                SearchOptions(families=[find_family(name)], oracle=simulated), parameter_sizes=sizes,
            )  # fmt: skip
            (folder / f"{name}.json").write_text(plan_json(plan), encoding="utf-8")


def measured(path: Path, steps: int) -> dict[str, Any]:
    """Peaks and times of one plan, in this process."""
    torch.set_num_threads(1)
    plan, batch, times = read_plan(path), gpt.data(), []
    pipe = panpipe.pipeline(gpt.make(), gpt.step, batch, optimizer=None, plan=plan)
    for _ in range(steps):
        start = time.perf_counter()
        pipe.step(batch)
        times.append(time.perf_counter() - start)
    _, trace = pipe.trace_step(batch)
    peaks = [
        max(sample.bytes for sample in trace.memory if sample.device == device and sample.kind == "saved")
        for device in range(DEVICES)
    ]
    pipe.close()
    assert plan.prediction is not None
    costs, count = plan.prediction.costs, PUBLISHED[path.stem]
    pairs = count * len(costs) // DEVICES
    here = (pairs - 1) * costs[0].saved_bytes + costs[-1 if len(costs) > DEVICES else 0].saved_bytes
    return {
        "published_bytes": here,
        "schedule": plan.schedule,
        "predicted": list(plan.prediction.peak_saved_bytes),
        "measured": peaks,
        "step_s": statistics.median(times),
    }


def separately(*arguments: str) -> str:
    """What this script prints with other arguments: a process of its own, in which nothing is left of another one."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return done.stdout


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_plans(arguments.write)
        return
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.steps)))
        return
    rows: list[tuple[str, ...]] = []
    reference = 0
    with tempfile.TemporaryDirectory() as folder:
        separately("--write", folder)
        for name, count in PUBLISHED.items():
            plan = str(Path(folder, f"{name}.json"))
            found = json.loads(separately("--one", plan, "--steps", str(arguments.steps)).splitlines()[-1])
            worst = max(abs(p / m - 1) for p, m in zip(found["predicted"], found["measured"], strict=True))
            peak = max(found["measured"])
            reference = reference or peak
            print(json.dumps({**found, "off": round(worst, 4), "over_1f1b": round(peak / reference, 3)}), flush=True)
            rows.append(
                (
                    found["schedule"],
                    " / ".join(f"{size / 1e6:.1f}" for size in found["predicted"]),
                    " / ".join(f"{size / 1e6:.1f}" for size in found["measured"]),
                    f"{worst:.1%}",
                    f"{peak / reference:.3f}",
                    f"{found['published_bytes'] / reference:.3f}",
                    f"{count / PUBLISHED['1f1b']:.3f}",
                    f"{found['step_s']:.2f}",
                )
            )
    header = (
        "schedule", "predicted peak MB, devices 0–3", "measured", "worst difference", "peak over 1F1B's",
        "published, here", "published, uniform", "step s",
    )  # fmt: skip
    report(arguments.record, "Saved tensors by schedule, benchmark GPT, four threads", header, rows)


if __name__ == "__main__":
    main()
