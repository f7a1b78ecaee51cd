"""Host time per operator: a pipeline's step compared with eager PyTorch, for very small tensors.

    python benchmarks/runtime/host_time.py [--microbatches 16] [--rounds 15] [--record FILE]

A GPT of width 16 on sequences of 4 tokens: its kernels take almost no time, so a step takes the host's time. In one
run, taking turns: a pipeline of one device, the same compiled by Inductor, and eager PyTorch with autograd, which runs
the same microbatches one after another and accumulates gradients; without an optimizer. CPU seconds of all threads are
divided by the number of operators that the stage's programs run for a microbatch, which are fewer calls if compiled.
What is reported is the median over rounds, and the median over rounds of the ratio to eager PyTorch.
"""

import statistics
import time
from collections.abc import Callable

import panpipe
import torch
from panpipe.benchmarks import gpt
from panpipe.benchmarks.driver import argument_parser, report, seconds
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.joint_graph import trace_joint
from panpipe.core.capture.programs.stage import stage_graph

WIDTH, LAYERS, VOCABULARY, LENGTH = 16, 4, 32, 4


def model() -> torch.nn.Module:
    return gpt.stack(gpt.Block, WIDTH, LAYERS, VOCABULARY)


def pipeline(
    batch: tuple[torch.Tensor, torch.Tensor], microbatches: int, compile: str | None = None
) -> tuple[panpipe.Pipeline, int]:
    """A pipeline of one device, and the number of operators of its forward and backward."""
    piece = tuple(tensor[:1] for tensor in batch)
    operators = operators_of(capture_step(model(), gpt.step, piece))
    plan = gpt.even_plan_of(operators, microbatches)
    joint = trace_joint(stage_graph(operators, [stage.nodes for stage in plan.stages], 0))
    count = sum(node.op == "call_function" for node in joint.graph.nodes)
    return panpipe.pipeline(
        model(), gpt.step, batch, optimizer=None, plan=plan, run=panpipe.Run(compile=compile)
    ), count


def eager(batch: tuple[torch.Tensor, torch.Tensor], microbatches: int) -> Callable[[], None]:
    network = model()
    pieces = list(zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True))
    share = torch.tensor(1 / microbatches)

    def run() -> None:
        network.zero_grad(set_to_none=True)
        for piece in pieces:
            gpt.step(network, piece).backward(share)

    return run


def main() -> None:
    arguments = argument_parser(__doc__, microbatches=16, rounds=15).parse_args()
    torch.set_num_threads(1)
    batch = gpt.data(arguments.microbatches, LENGTH, VOCABULARY)
    pipe, count = pipeline(batch, arguments.microbatches)
    compiled, _ = pipeline(batch, arguments.microbatches, "inductor")
    runs: dict[str, Callable[[], object]] = {
        "panpipe": lambda: pipe.step(batch),
        "panpipe, compiled": lambda: compiled.step(batch),
        "eager PyTorch": eager(batch, arguments.microbatches),
    }  # fmt: skip
    for run in runs.values():
        run()
    times = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            median_s = statistics.median(seconds(run, 3, clock=time.process_time))
            times[name].append(1e6 * median_s / arguments.microbatches / count)
    for name in list(times)[:-1]:
        pairs = zip(times[name], times["eager PyTorch"], strict=True)
        times[f"{name} ÷ eager PyTorch"] = [ours / theirs for ours, theirs in pairs]
    rows = [(name, f"{statistics.median(of):.2f}", f"{min(of):.2f} … {max(of):.2f}") for name, of in times.items()]
    columns = ("runner", f"CPU µs per operator, of {count} for a microbatch", "range")
    report(arguments.record, "Host time per operator, very small tensors", columns, rows)


if __name__ == "__main__":
    main()
