"""A batch that is run once by a plan, and what a failure drops."""

import pytest
import torch
from panpipe.core.errors import WorkerError
from panpipe.runtimes.engine.step_data import StepInputs, StepOptions
from panpipe.runtimes.training.batch_run import BatchRun

from ...support.stages.arranged import MICROBATCHES, Arranged
from ...support.stages.two_stages import KEY


@pytest.fixture
def made():
    found = Arranged()
    found.parts.stages.ensure_values()
    yield found
    found.team.close()


def batch_of(made, pieces):
    return BatchRun(made.parts.variants, pieces, MICROBATCHES, made.team, made.workers)


def inputs(pieces):
    seeds = torch.tensor([piece.weight for piece in pieces])
    return StepInputs(pieces, [KEY] * len(pieces), seeds, [None] * len(pieces))


def test_batch_has_the_mean_loss_and_the_records_of_all_devices(made):
    pieces = made.pieces()
    _, loss = made.alone(pieces)
    called = []
    done = batch_of(made, pieces).run(
        inputs(pieces), StepOptions(trace=True), "as before",
        lambda device: called.append(("before the end", device)), lambda device: called.append(("after", device)),
    )  # fmt: skip
    assert done.loss.item() == pytest.approx(loss)
    assert (done.metrics(), done.rows, done.trace) == ({}, None, None)
    assert set(done.records) == {0, 1}
    assert done.plan == made.plan
    assert sorted(called) == [("after", 0), ("after", 1), ("before the end", 0), ("before the end", 1)]


def test_failed_batch_forgets_the_prepared_steps(made):
    pieces = made.pieces()
    run = batch_of(made, pieces)
    prepared = run.prepared

    def fail(device):
        raise KeyError("the update's own")

    with pytest.raises(WorkerError, match="the update's own"):
        run.run(inputs(pieces), StepOptions(), "as before", fail)
    assert batch_of(made, pieces).prepared is not prepared


def test_batch_of_known_shapes_is_prepared_once(made):
    first, second = (batch_of(made, made.pieces(seed)) for seed in range(2))
    assert second.prepared is first.prepared
    assert second.remark is None
