"""Which programs of a stage a plan runs, and that only these are compiled before a step."""

import panpipe
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.runtimes.programs.compiler_choice import CompilerChoice
from panpipe.runtimes.programs.stage_compiler import StageCompiler
from torch import nn

from ...support.cuts import even_plan


def test_only_what_a_plan_runs_is_compiled_and_nothing_within_a_step():
    asked = []

    def counting(graph, examples):
        asked.append(graph)
        return graph.forward

    def step(model, batch):
        return model(batch["x"]).pow(2).mean()

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(2)])
    batch = {"x": torch.randn(8, 8)}
    operators = operators_of(capture_step(model, step, {"x": batch["x"][:2]}))
    plan = even_plan(operators, 2, 4)
    with panpipe.pipeline(
        model, step, batch, plan=plan, optimizer=torch.optim.SGD, run=panpipe.Run(compile=counting)
    ) as pipe:
        compiled = len(asked)
        for _ in range(2):
            pipe.step(batch)
        assert len(asked) == compiled
    asked.clear()
    compiler, names = StageCompiler(CompilerChoice.of(counting)), [stage.nodes for stage in plan.stages]
    for index in range(2):
        compiler.programs(stage_graph(operators, names, index), index)
    assert compiled < len(asked)
