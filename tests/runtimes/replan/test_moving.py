"""Stages move to another plan while they train: the results have the same bits as without."""

import panpipe
import pytest
import torch
from panpipe.runtimes.launch.team import ThreadTeam

from ...support.models import CASES
from ...support.ranks.replanning import CHANGES, move, moved_and_not, plan_of, replannable
from ...support.training import parameters, unequal

GPT = CASES["tied gpt with dropout"]


def batch():
    return GPT.batch(8, torch.float32)


@pytest.mark.parametrize("name", CHANGES)
def test_training_goes_on_with_the_same_bits_after_stages_moved(name):
    found = moved_and_not(ThreadTeam(2), name)
    assert found["moved"] == found["kept"] | {"stages": found["moved"]["stages"]}


def test_checkpoint_after_a_move_resumes_under_the_first_plan(tmp_path):
    pipe = replannable(GPT)
    pipe.step(batch())
    move(pipe, plan_of(GPT, ThreadTeam(2), chunks=2, schedule_name="v-half"))
    pipe.step(batch())
    pipe.checkpoint(tmp_path / "1")
    again = replannable(GPT)
    again.resume(tmp_path / "1")
    assert torch.equal(pipe.step(batch()), again.step(batch()))
    assert unequal(parameters(pipe._session.model), parameters(again._session.model)) == []


def test_plan_that_cannot_run_changes_nothing():
    pipe, plain = replannable(GPT), replannable(GPT)
    pipe.step(batch())
    plain.step(batch())
    wrong = plan_of(CASES["batchnorm with a skip"], ThreadTeam(2))
    with pytest.raises((panpipe.RequestError, KeyError)):
        move(pipe, wrong)
    assert torch.equal(pipe.step(batch()), plain.step(batch()))
    assert unequal(parameters(pipe._session.model), parameters(plain._session.model)) == []


def refusal(pipe):
    with pytest.raises(panpipe.RequestError) as found:
        pipe.replan()
    assert "\n" not in str(found.value)
    return str(found.value)


def test_pipelines_that_cannot_be_planned_again_are_refused():
    pipe = replannable(GPT)
    pipe.step(batch(), update=False)
    assert "gradients wait for an update" in refusal(pipe)
    pipe.step(batch())
    pipe._session.model.blocks[0].dropout = 0.3
    assert "other Python values" in refusal(pipe)
    pipe._session.model.blocks[0].dropout = 0.1
    pipe._session.model.norm.weight.requires_grad_(False)
    assert "parameter 'norm.weight' was frozen" in refusal(pipe)
    pipe._session.model.norm.weight.requires_grad_(True)
    assert pipe.metrics.learning_rates
    assert pipe._session.changes.replanner.refusal(pipe._trainer) is None
    assert pipe.optimizers
    assert "pipe.optimizers was read" in refusal(pipe)
    pipe._session.changes.replanner = None
    assert "build it with panpipe.pipeline" in refusal(pipe)
    with pytest.raises(panpipe.RequestError, match="replan is 'often': give 'auto'"):
        panpipe.pipeline(GPT.model(torch.float32), GPT.step, batch(), run=panpipe.Run(replan="often"))
