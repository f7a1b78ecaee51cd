"""A stage graph as a module: operators one by one, and each random draw at its ordinal in the whole graph."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.capture.programs.joint_graph import StageModule
from panpipe.core.capture.programs.stage import stage_graph
from torch import nn

KEY = random_key(0, 0, 0)
ROWS, WIDTH = 2, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


def step(model, batch):
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def stages():
    with torch.enable_grad():
        operators = operators_of(capture_step(network(), step, torch.zeros(ROWS, WIDTH)))
    names = [node.name for node in operators.graph.nodes]
    cut = [names[:2], names[2:]]
    return [stage_graph(operators, cut, index) for index in range(2)]


def inputs(stage, boundary, batch):
    model = network()
    parameters = dict(model.named_parameters())
    given = [*boundary, *(parameters[name] for name in stage.inputs.parameters)]
    return [*given, *([batch] if stage.inputs.batch else []), *([KEY] if stage.inputs.random else [])]


def test_stages_draw_what_the_whole_step_draws(stages):
    batch = torch.ones(ROWS, WIDTH)
    model = network()
    with KeyedRandom(KEY):
        wanted = step(model, batch)
    first, second = map(StageModule, stages)
    sent = first(*inputs(stages[0], [], batch))
    (found,) = second(*inputs(stages[1], sent, batch))
    assert torch.equal(found, wanted)


def test_no_operator_runs_before_and_after(stages):
    module = StageModule(stages[0])
    assert module.running is None
    module(*inputs(stages[0], [], torch.ones(ROWS, WIDTH)))
    assert module.running is None


def test_operator_that_raises_an_error_is_known(stages):
    module = StageModule(stages[0])
    wrong = inputs(stages[0], [], torch.ones(ROWS, WIDTH + 1))
    with pytest.raises(RuntimeError):
        module(*wrong)
    assert "linear" in str(module.running.target)
