"""Bytes that a stage's programs hold: saved, freed by I, created for W, shared, kept for recompute, workspace."""

import pytest
import torch
from panpipe.core.capture.programs.programs import stage_programs
from panpipe.core.capture.programs.stage_programs import StageMemory
from torch import nn

from ....support.stages.graphs import operators, stages

ROWS, WIDTH = 8, 16
HIDDEN = ROWS * WIDTH * 4
"""Bytes of one hidden tensor in float32."""


def memory(model, *starts, index=0, step=None):
    found = operators(model, step or (lambda model, batch: model(batch).square().mean()), torch.ones(ROWS, WIDTH))
    return stage_programs(stages(found, *starts)[index]).memory


def mlp(*more):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), *more)


def test_first_stage_saves_only_what_it_computes():
    found = memory(mlp(), 2)
    assert (found.saved, found.inputs, found.shared) == (HIDDEN, 0, 0)  # the result of tanh; the batch is not counted


def test_later_stage_saves_its_input_and_keeps_it_to_recompute():
    found = memory(mlp(), 1, index=1)
    assert found.inputs == HIDDEN
    assert found.saved == 2 * HIDDEN  # results of tanh and of the second layer, which square() needs


def test_created_and_freed_by_the_input_gradient():
    found = memory(mlp(), 1, index=1)
    assert found.created_by_input == HIDDEN  # the gradient of the second layer's result
    assert found.freed_by_input == HIDDEN  # that result itself, which the weight's gradient does not need


def test_stage_without_gradients_of_inputs_has_neither():
    found = memory(mlp(), 2)
    assert (found.freed_by_input, found.created_by_input) == (0, 0)


def test_views_of_one_storage_count_once():
    def step(model, batch):
        hidden = model(batch)
        left, right = hidden.chunk(2, 1)
        return (left * right).sum()

    assert memory(nn.Linear(WIDTH, WIDTH), step=step).saved == HIDDEN


def test_workspace_is_more_than_inputs_and_kept_tensors():
    small, large = memory(mlp(), 2).workspace, memory(mlp(nn.Linear(WIDTH, 32 * WIDTH)), 2, index=1).workspace
    assert 0 < small <= 2 * HIDDEN
    assert large >= 32 * HIDDEN


def test_casts_of_parameters_are_shared():
    def step(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().square().mean()

    found = memory(nn.Linear(WIDTH, WIDTH), step=step)
    assert found.shared == (WIDTH * WIDTH + WIDTH) * 2


def test_function_without_gradients_saves_nothing():
    model, step = mlp(), lambda model, batch: model(batch).square().mean()
    with torch.no_grad():
        found = operators(model, step, torch.ones(ROWS, WIDTH), gradients=False)
        assert stage_programs(stages(found)[0]).memory.saved == 0


@pytest.mark.parametrize("name", ["saved", "freed_by_input", "created_by_input", "workspace", "inputs", "shared"])
def test_all_are_whole_numbers(name):
    found = memory(mlp(), 1, index=1)
    assert isinstance(found, StageMemory)
    assert isinstance(getattr(found, name), int)
    assert getattr(found, name) >= 0
