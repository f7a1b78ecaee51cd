"""The trainer of two threads: counts, results, and what is refused."""

import warnings

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import NonFiniteError, RequestError
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.optimizer.update import Ending
from panpipe.runtimes.programs.options import ProgramOptions
from panpipe.runtimes.training.evaluation import ForwardFunction
from panpipe.runtimes.training.initial_weights import compare_initial_weights
from panpipe.runtimes.training.trainer import Trainer
from panpipe.runtimes.weights import weights_from

from ...support.cuts import captured_once, even_plan
from ...support.stages.arranged import CASE, MICROBATCHES, ROWS, SGD, WIDTH, Arranged, _programs, step

STEP, KEEP = (StepOptions(each) for each in (Ending.STEP, Ending.KEEP))


def trainer_of(**training):
    operators = captured_once(CASE, torch.float32, ROWS, MICROBATCHES)
    monitors = training.pop("monitors", ())
    made = Arranged()
    made.team.close()
    model, team = CASE.model(torch.float32), ThreadTeam(2)
    example = Example(model, step, made.pieces()[0], operators)
    trainer = Trainer(
        example, even_plan(operators, 2, MICROBATCHES), team, evolve(Training(**training), optimizer=SGD),
        ProgramOptions(known=_programs(2)), monitors=monitors,
    )  # fmt: skip
    source = weights_from(None, model, 0)
    trainer.stages.load(source, compare_initial_weights(team, model, source))
    return trainer


@pytest.fixture
def trainer():
    found = trainer_of()
    yield found
    found.close()


def batch(seed=0, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def state(trainer):
    model = trainer.model
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(t.detach().clone() for t in (*model.parameters(), *model.buffers())), *gradients]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_steps_and_updates_are_counted(trainer):
    before = state(trainer)
    loss, done = trainer.train(batch(), KEEP)
    assert (trainer.counts.steps, trainer.counts.updates) == (1, 0)
    assert loss.item() == done.loss.item() == pytest.approx(step(CASE.model(torch.float32), batch()).item(), rel=0.5)
    assert all(map(torch.equal, list(trainer.model.parameters()), before))
    trainer.train(batch(1), STEP)
    assert (trainer.counts.steps, trainer.counts.updates) == (2, 1)
    assert not torch.equal(next(trainer.model.parameters()), before[0])
    assert not trainer.skipped
    assert trainer.norm is None


def test_evaluation_counts_nothing_and_returns_the_loss(trainer):
    before = state(trainer)
    done = trainer.evaluate(batch(), ForwardFunction(step))
    wanted = sum(step(CASE.model(torch.float32), half).item() for half in batch().chunk(2)) / 2
    assert done.loss.item() == pytest.approx(wanted)
    assert trainer.counts.steps == trainer.counts.updates == 0
    assert same(state(trainer), before)
    rows = trainer.evaluate(batch(), ForwardFunction(lambda model, x: model(x), True)).rows
    assert rows.shape == (ROWS, WIDTH)
    assert same(state(trainer), before)


def test_traced_step_is_kept_and_gathered(trainer):
    _, done = trainer.train(batch(), StepOptions(Ending.STEP, trace=True))
    trace = trainer.gathered_trace(done)
    assert trainer.trace is trace
    assert trace.plan_hash == trainer.plan.hash
    trainer.train(batch(), STEP)
    assert trainer.trace is trace


def test_remark_on_new_shapes_is_a_warning_after_the_first_step(trainer, monkeypatch):
    monkeypatch.setattr("panpipe.runtimes.batch.shapes._NOTICED_S", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(batch(), STEP)
    with pytest.warns(UserWarning, match="microbatches of a new shape"):
        trainer.train(batch(rows=2 * ROWS), STEP)


def test_steps_without_gradients_are_refused(trainer):
    with torch.no_grad(), pytest.raises(RequestError, match="no_grad"):
        trainer.train(batch(), STEP)


def test_closed_trainer_refuses_everything(trainer, tmp_path):
    trainer.close()
    trainer.close()
    for refused in (
        lambda: trainer.train(batch(), STEP),
        lambda: trainer.evaluate(batch(), ForwardFunction(step)),
        lambda: trainer.save(tmp_path),
    ):
        with pytest.raises(RequestError, match="the pipeline is closed"):
            refused()


def test_loss_that_is_not_finite_is_raised_after_the_step_counted_and_drops_gradients():
    trainer = trainer_of(on_nonfinite="raise")
    bad = batch()
    bad[0, 0] = float("nan")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError):
        trainer.train(bad, STEP)
    assert (trainer.counts.steps, trainer.counts.updates) == (1, 0)
    assert not trainer.runner.accumulating
    assert all(map(torch.equal, list(trainer.model.parameters()), before))
    trainer.close()


def test_monitors_get_the_numbers_of_each_step():
    reports = []
    trainer = trainer_of(monitors=[reports.append])
    trainer.train(batch(), STEP)
    trainer.train(batch(), KEEP)
    trainer.close()
    assert [(report.step, report.updated) for report in reports] == [(1, True), (2, False)]


def test_average_follows_each_update(trainer):
    average = trainer.averages.add(0.5, False, None)
    first = next(trainer.model.parameters()).detach().clone()
    trainer.train(batch(), KEEP)
    assert average.updates == 0
    trainer.train(batch(), STEP)
    assert average.updates == 1
    name, parameter = next(trainer.model.named_parameters())
    torch.testing.assert_close(average.tensors[name], (first + parameter.detach()) / 2)


def test_other_parts_are_adopted_together(trainer):
    operators = captured_once(CASE, torch.float32, ROWS, MICROBATCHES)
    example = Example(trainer.model, step, Arranged().pieces()[0], operators)
    plan = even_plan(operators, 2, MICROBATCHES, "gpipe")
    parts = trainer.set_up_plan(example, plan, ProgramOptions(known=_programs(2)))
    assert trainer.plan is not plan  # nothing has changed
    trainer.replace(parts)
    assert trainer.plan is parts.plan
    assert parts.plan.device_actions == plan.device_actions
    assert (trainer.stages, trainer.runner, trainer.evaluator) == (parts.stages, parts.runner, parts.evaluator)


def test_optimizers_are_those_of_the_stages_with_parameters(trainer):
    assert all(isinstance(optimizer, torch.optim.SGD) for optimizer in trainer.optimizers.values())
    held = [p for optimizer in trainer.optimizers.values() for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in trainer.model.parameters()}
