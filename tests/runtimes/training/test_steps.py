"""One training step over two threads: gradients and update, accumulation, and updates that are skipped."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.optimizer.update import Ending

from ...support.stages.arranged import RATE, Arranged


@pytest.fixture
def made():
    found = Arranged()
    found.parts.stages.ensure_values()
    yield found
    found.team.close()


def run(made, pieces, index=0, ending=Ending.STEP):
    runner = made.parts.runner
    return runner.run(runner.batch(pieces), index, StepOptions(ending))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_step_is_that_of_one_process(made):
    pieces, before = made.pieces(), weights(made.model)
    alone, loss = made.alone(pieces)
    done = run(made, pieces)
    assert done.loss.item() == pytest.approx(loss)
    for (name, mine), theirs in zip(made.model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(mine.detach(), before[name] - RATE * theirs.grad)
    torch.testing.assert_close(made.model[1].running_mean, alone[1].running_mean)


def test_batches_are_accumulated_by_their_sizes(made):
    small, large = made.pieces(1, rows=4), made.pieces(2, rows=8)
    wanted = {}
    for pieces, share in ((small, 4), (large, 8)):
        for name, p in made.alone(pieces)[0].named_parameters():
            wanted[name] = wanted.get(name, 0) + p.grad * share / 12
    run(made, small, 0, Ending.KEEP)
    assert made.parts.runner.accumulating
    before = weights(made.model)
    run(made, large, 1)
    assert not made.parts.runner.accumulating
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.detach(), before[name] - RATE * p.grad)


def test_accumulated_gradients_may_be_dropped_and_not_cleared(made):
    run(made, made.pieces(1), 0, Ending.KEEP)
    made.model.zero_grad()
    with pytest.raises(RequestError):
        run(made, made.pieces(2), 1)
    made.parts.runner.drop_accumulated()
    alone, _ = made.alone(made.pieces(3))
    run(made, made.pieces(3), 1)
    torch.testing.assert_close(made.model[0].weight.grad, alone[0].weight.grad)


def test_norm_of_a_clipped_update_is_that_before_clipping():
    made = Arranged(Training(clip_norm=1e-3))
    made.parts.stages.ensure_values()
    pieces = made.pieces()
    alone, _ = made.alone(pieces)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    run(made, pieces)
    torch.testing.assert_close(made.parts.runner.norm, wanted)
    norm = torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters()])
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert not made.parts.runner.skipped
    made.team.close()


def test_update_of_a_loss_that_is_not_finite_is_skipped():
    made = Arranged(Training(on_nonfinite="skip"))
    made.parts.stages.ensure_values()
    before = weights(made.model)
    pieces = made.pieces()
    pieces[0].leaves[0][0, 0] = float("nan")
    run(made, pieces)
    assert made.parts.runner.skipped
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    made.team.close()


def test_step_without_clipping_has_no_norm(made):
    run(made, made.pieces())
    assert made.parts.runner.norm is None
