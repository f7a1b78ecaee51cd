"""Which programs of a stage a plan runs, and that only these are compiled before a step."""

from types import SimpleNamespace

import panpipe
import pytest
import torch
from panpipe.core.actions import Kind
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.programs.stage import stage_graph
from panpipe.runtimes.programs.compiler_choice import CompilerChoice
from panpipe.runtimes.programs.stage_compiler import PlannedCompiler, StageCompiler, programs_run
from torch import nn

from ...support.cuts import even_plan

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the names of the kinds
WHOLE = SimpleNamespace(
    forward="F", forward_alone="F alone", recompute=SimpleNamespace(run="R"), backward=SimpleNamespace(run="B"),
    backward_input=SimpleNamespace(run="I"), backward_weight=SimpleNamespace(run="W"),
)  # fmt: skip
UNSPLIT = SimpleNamespace(**{**vars(WHOLE), "backward_input": None, "backward_weight": None})
FROZEN = SimpleNamespace(**{**vars(UNSPLIT), "backward": None})


@pytest.mark.parametrize(
    ("programs", "kinds", "again", "wanted"),
    [
        (WHOLE, [F, B], False, ["F", "B"]),
        (WHOLE, [F, I, W], False, ["F", "I", "W"]),
        (WHOLE, [F, I, W, B], False, ["F", "B", "I", "W"]),
        (UNSPLIT, [F, I, W], False, ["F", "B"]),
        (WHOLE, [F, B], True, ["F alone", "R", "B"]),
        (WHOLE, [F], False, ["F"]),
        (WHOLE, [F], True, ["F alone"]),
        (FROZEN, [F, B], False, ["F"]),
    ],
)
def test_programs_that_a_plan_runs(programs, kinds, again, wanted):
    assert programs_run(programs, kinds, again) == wanted


def test_without_compilation_there_is_no_compiler():
    assert PlannedCompiler.of(None, None) is None


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
