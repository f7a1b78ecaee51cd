"""Planning again: when it is worth moving, what is refused, and what is logged."""

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.replan import replanner as module
from panpipe.runtimes.replan.replanner import LEAST_GAIN, ReplanResult, describe_result, kept_example

from ...support.cuts import captured_once
from ...support.models import CASES
from ...support.plans import orders, plan_of, predicted
from ...support.ranks.replanning import CHANGES, DTYPE, replannable, replanner_of
from ...support.ranks.replanning import plan_of as even_plan_of

PRESENT = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
OTHER = evolve(PRESENT, schedule="gpipe")
NAME = "batchnorm with a skip"


@pytest.mark.parametrize(
    ("plan", "present_s", "moves"),
    [
        (OTHER, 1 + 1.01 * LEAST_GAIN, True),
        (OTHER, 1 + 0.99 * LEAST_GAIN, False),
        (OTHER, 0.9, False),
        (PRESENT, 2.0, False),  # the same plan again
    ],
)
def test_stages_move_if_the_present_plan_is_slower_by_enough(plan, present_s, moves):
    found = ReplanResult(predicted(plan, 1.0), present_s, (1.0, 1.0))
    assert found.gain == pytest.approx(present_s - 1)
    assert found.worth_moving(PRESENT) is moves


def test_log_has_the_slow_devices_and_the_gain():
    found = ReplanResult(predicted(OTHER, 0.5), 0.75, (1.0, 1.5))
    text = describe_result(found, True)
    assert text.startswith("device 1 takes 1.50 times as long as the fastest; a faster plan is gpipe, ")
    assert text.endswith("predicted step 500 ms, +50% against 750 ms of the plan before")
    assert describe_result(found, False).endswith("no plan is predicted to gain 5% over the present one: it stays")
    assert describe_result(ReplanResult(OTHER, 1.0, (1.0, 1.0)), False).startswith("all devices are equally fast; ")
    assert describe_result(None, False) == "no plan fits the devices at their present speeds: the present one stays"


def test_example_is_kept_although_the_users_batch_changes():
    leaf = torch.ones(2)
    case = CASES[NAME]
    piece = split_batch(case.batch(8, DTYPE), 4)[0]
    example = Example(case.model(DTYPE), case.step, evolve(piece, leaves=(leaf, 3)), captured_once(case, DTYPE, 8, 4))
    kept = kept_example(example)
    leaf.zero_()
    assert kept.microbatch.leaves[0].tolist() == [1.0, 1.0]
    assert kept.microbatch.leaves[1] == 3


@pytest.fixture
def pipe():
    pipe = replannable(CASES[NAME])
    yield pipe
    pipe.close()


def test_pipeline_that_can_be_planned_again_is_not_refused(pipe):
    assert pipe._session.replanner.refusal(pipe._trainer) is None


def test_reasons_against_planning_again(pipe):
    trainer, batch = pipe._trainer, CASES[NAME].batch(8, DTYPE)

    def reason():
        return str(pipe._session.replanner.refusal(trainer))

    pipe.step(batch, update=False)
    assert "gradients wait for an update since step(batch, update=False)" in reason()
    pipe.step(batch)
    parameter = next(iter(pipe._session.model.parameters()))
    parameter.requires_grad_(False)
    assert "was frozen since its optimizer was created" in reason()
    parameter.requires_grad_(True)
    other = replanner_of(pipe, CASES[NAME])
    other._reads = "other values"
    assert "the step reads other Python values than when it was captured" in str(other.refusal(trainer))
    assert pipe.optimizers
    assert "pipe.optimizers was read" in reason()
    training = trainer.training
    trainer.training = evolve(training, optimizer=None)
    trainer.optimizers_lent = False
    assert "the pipeline has no optimizer" in reason()
    trainer.training = training


@pytest.mark.parametrize(
    ("asked", "levels", "wanted"),
    [
        ("none", (), "none"),
        ("auto", (), "none"),  # it fits without
        ("gradients", ("gradients", "gradients"), "gradients"),
        ("auto", ("none", "parameters"), "auto"),
        ("none", ("gradients", "optimizer"), "gradients"),  # a plan from a file
    ],
)
def test_new_plan_shares_what_the_present_one_does(pipe, asked, levels, wanted):
    replanner = replanner_of(pipe, CASES[NAME])
    replanner.options = evolve(replanner.options, memory=panpipe.Memory(shard=asked))
    assert replanner._level(evolve(PRESENT, shard=levels)) == wanted


def test_refused_pipeline_keeps_its_plan(pipe, monkeypatch):
    pipe.step(CASES[NAME].batch(8, DTYPE), update=False)
    plan = pipe.plan
    with pytest.raises(RequestError, match="this pipeline cannot be planned again: gradients wait"):
        pipe._session.replanner.replan(pipe._trainer, pipe._session.checkpoints)
    assert pipe.plan is plan


def test_plan_for_updates_that_clip_is_found_with_its_prediction(pipe, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    pipe.step(CASES[NAME].batch(8, DTYPE))
    assert pipe._trainer.training.clip_norm is not None
    found = pipe._session.replanner.find(pipe._trainer)
    assert found.plan.sync
    assert found.plan.predicted.step_s > 0


@pytest.mark.parametrize("moves", [True, False])
def test_stages_move_only_to_a_plan_that_gains_enough(pipe, monkeypatch, caplog, moves):
    case = CASES[NAME]
    pipe.step(case.batch(8, DTYPE))
    plan = predicted(even_plan_of(case, pipe._trainer.team, **CHANGES[NAME][0]), 1.0)
    found = ReplanResult(plan, 2.0 if moves else 1.01, (1.0, 1.0))
    monkeypatch.setattr(module.Replanner, "find", lambda self, trainer: found)
    before = pipe.plan
    assert pipe._session.replanner.replan(pipe._trainer, pipe._session.checkpoints) is moves
    assert (pipe.plan is before) is not moves
    assert pipe.plan.device_actions == (plan if moves else before).device_actions
    assert ("a faster plan is" in caplog.text) is moves
    assert torch.isfinite(pipe.step(case.batch(8, DTYPE)))
    assert pipe.metrics.steps == 2
