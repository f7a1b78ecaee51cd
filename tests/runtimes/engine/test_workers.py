"""The devices of a process: one queue and one executor each, and a prepared step that runs on all."""

import pytest
import torch
from panpipe.core.errors import WorkerError
from panpipe.runtimes.engine.step_data import StepInputs, StepOptions
from panpipe.runtimes.optimizer.update import Ending

from ...support.stages.arranged import Arranged
from ...support.stages.two_stages import KEY


@pytest.fixture
def made():
    found = Arranged()
    found.parts.stages.ensure_values()
    yield found
    found.team.close()


def run(made, pieces, options=None, before=None, after=None):
    prepared = made.parts.runner.batch(pieces).prepared
    seeds = torch.tensor([piece.weight for piece in pieces])
    inputs = StepInputs(pieces, [KEY] * len(pieces), seeds, [None] * len(pieces))
    return prepared, made.workers.run(
        prepared, inputs, options or StepOptions(Ending.KEEP), before or nothing, after or nothing
    )


def nothing(*_):
    pass


def test_each_device_has_a_queue_and_an_executor_of_its_own(made):
    workers = made.workers
    assert set(workers.queues) == {0, 1}
    assert workers.executor(0) is workers.executor(0) is not workers.executor(1)
    assert workers.update(1) is workers.executor(1).update
    assert [workers.executor(d).device for d in (0, 1)] == [0, 1]


def test_step_runs_on_all_devices_and_returns_their_records(made):
    pieces = made.pieces()
    order = {0: [], 1: []}
    alone, _ = made.alone(pieces)
    _, (records, trace) = run(
        made, pieces, StepOptions(Ending.KEEP, trace=True),
        lambda device, record: order[device].append("before the end"),
        lambda device: order[device].append("after"),
    )  # fmt: skip
    assert trace is None
    assert set(records) == {0, 1}
    assert order == {0: ["before the end", "after"], 1: ["before the end", "after"]}
    assert all(not record.results for record in records.values())  # freed
    torch.testing.assert_close(made.model[0].weight.grad, alone[0].weight.grad)


def test_instructions_are_bound_once_for_each_prepared_step(made):
    pieces = made.pieces()
    prepared, _ = run(made, pieces)
    bound = dict(prepared.bound)
    assert set(bound) == {0, 1}
    again, _ = run(made, pieces)
    assert again is prepared
    assert all(again.bound[device] is bound[device] for device in bound)


def test_failure_of_one_device_ends_all(made):
    def fail(device, record):
        if device == 1:
            raise KeyError("its own")

    with pytest.raises(WorkerError, match="device 1 stopped: KeyError: 'its own'"):
        run(made, made.pieces(), before=fail)
