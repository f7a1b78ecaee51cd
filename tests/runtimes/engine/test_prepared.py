"""The cache of prepared steps: what it prepares for given microbatches, and how long it keeps it."""

import pytest
from panpipe.runtimes.engine.prepared import PreparedSteps

from ...support.plans import orders, plan_of
from ...support.stages.two_stages import TwoStages

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


class Shapes(set):
    """Programs of two stages, for every shape that it is asked for."""

    captures = 1

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def programs_for(self, pieces):
        self.update(piece.shape for piece in pieces)
        return [self.compiled] * len(pieces), None


class Agreement:
    """Counts how often ranks would compare their batches."""

    compared = 0

    def refuse_before_run(self):
        self.compared += 1


@pytest.fixture
def cache():
    stages = TwoStages()
    shapes = Shapes(stages.compiled)
    return PreparedSteps(lambda: PLAN, shapes, stages.states, stages.model, (0, 1)), shapes, stages.pieces


def test_prepared_step_has_the_stages_of_each_device_for_each_microbatch(cache):
    steps, _, pieces = cache
    prepared, remark = steps.of(pieces, Agreement())
    assert remark is None
    assert {device: [sorted(own) for own in runs] for device, runs in prepared.runs.items()} == {
        0: [[0], [0]],
        1: [[1], [1]],
    }
    assert prepared.plan.microbatches == len(prepared.compiled) == 2


def test_prepared_step_is_kept_and_compared_between_ranks_only_when_it_is_new(cache):
    steps, _, pieces = cache
    agreement = Agreement()
    assert not steps.known(pieces)
    first, _ = steps.of(pieces, agreement)
    assert steps.known(pieces)
    assert steps.of(pieces, agreement)[0] is first
    assert agreement.compared == 1


def test_prepared_step_is_dropped_with_the_programs_of_its_shape(cache):
    steps, shapes, pieces = cache
    steps.of(pieces, Agreement())
    shapes.clear()
    shapes.programs_for = lambda pieces: ([shapes.compiled] * len(pieces), None)
    steps.of(pieces[:1], Agreement())
    assert not steps.known(pieces)


def test_prepared_steps_forget_drops_every_step(cache):
    steps, _, pieces = cache
    first, _ = steps.of(pieces, Agreement())
    steps.forget()
    assert not steps.known(pieces)
    assert steps.of(pieces, Agreement())[0].runs[0][0][0] is not first.runs[0][0][0]
